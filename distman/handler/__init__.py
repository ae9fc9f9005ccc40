"""Training on any number of ranks, put together from small parts."""

from __future__ import annotations

from distman.handler._callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from distman.handler._history import History
from distman.handler._nn_handler import NNHandler
from distman.handler._resumption import Preempted

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "NNHandler",
    "Preempted",
]
