"""Training of a model on any number of ranks."""

from __future__ import annotations

# What is imported as itself is for other parts of the package.
from distman.handler._archive import Preempted
from distman.handler._callbacks import (
    Best as Best,
    EarlyStopping,
    ModelCheckpoint,
    ReplicaCheck,
)
from distman.handler._events import Callback
from distman.handler._history import History
from distman.handler._nn_handler import NNHandler
from distman.handler._objective import evaluating as evaluating
from distman.handler._tracking import JsonLinesTracker, MLflowTracker, TensorBoardTracker, Tracker, WandbTracker
from distman.training import Stepper

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "JsonLinesTracker",
    "MLflowTracker",
    "ModelCheckpoint",
    "NNHandler",
    "Preempted",
    "ReplicaCheck",
    "Stepper",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]
