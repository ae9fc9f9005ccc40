"""Training of a model on any number of ranks."""

from __future__ import annotations

from distman.handler._callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from distman.handler._events import Callback
from distman.handler._history import History
from distman.handler._json_lines import JsonLinesTracker
from distman.handler._mlflow import MLflowTracker
from distman.handler._nn_handler import NNHandler
from distman.handler._profiling import Profiler
from distman.handler._resumption import Preempted
from distman.handler._stepper import Stepper
from distman.handler._tensorboard import TensorBoardTracker
from distman.handler._tracking import Tracker
from distman.handler._wandb import WandbTracker
from distman.handler._warm_start import TakenWeights

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "JsonLinesTracker",
    "LearningRateMonitor",
    "MLflowTracker",
    "ModelCheckpoint",
    "NNHandler",
    "Preempted",
    "Profiler",
    "Stepper",
    "TakenWeights",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]
