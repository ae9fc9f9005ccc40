"""Training of a model on any number of ranks."""

from __future__ import annotations

from distman.handler._callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from distman.handler._events import Callback
from distman.handler._history import History
from distman.handler._nn_handler import NNHandler
from distman.handler._resumption import Preempted
from distman.handler._stepper import Stepper

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "NNHandler",
    "Preempted",
    "Stepper",
]
