"""Training on any number of ranks, put together from small parts."""

from __future__ import annotations

from distman.handler.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from distman.handler.history import History
from distman.handler.nn_handler import NNHandler
from distman.handler.resumption import Preempted

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "NNHandler",
    "Preempted",
]
