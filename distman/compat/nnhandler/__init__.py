"""What the package NNHandler is to its users: all names of its modules, in one.

Change an import such as ``from nn_handler.utils.ddp_decorators import on_rank``, whatever module it names, to ``from
distman.compat.nnhandler import on_rank``. Arguments mean what they mean there; what differs is said beside the name.
What cannot be kept raises, and says what to write instead.
"""

from __future__ import annotations

import sys
from typing import Any

from distman._base.public_names import error_of_missing
from distman._job.device import pick_device as _pick_device
from distman._version import VERSION as __version__  # noqa: N811 - its name everywhere
from distman.compat.nnhandler._callbacks import (
    EarlyStopping,
    EpochTimer,
    LearningRateMonitor,
    ModelCheckpoint,
    ParameterNormMonitor,
    ParamScheduler,
    TensorBoardLogger,
    WandbLogger,
)
from distman.compat.nnhandler._ddp import (
    ParallelExecutor,
    _is_env_distributed,
    _resolve_device,
    _should_use_distributed,
    aggregate_loss,
    aggregate_metrics,
    broadcast_data,
    broadcast_data as broadcast_if_ddp,
    broadcast_data as broadcast_tensor,
    initialize_ddp,
    initialize_ddp as _initialize_distributed,
    make_train_val_indices,
    on_rank,
    parallelize_on_gpus,
)
from distman.compat.nnhandler._events import Callback
from distman.compat.nnhandler._handler import NNHandler
from distman.compat.nnhandler._kinds import (
    DataLoaderType,
    LoggingMode,
    ModelType,
    Sampler,
    denoising_score_matching,
    initialize_logger,
)
from distman.compat.nnhandler._names import REFUSED
from distman.decorators import parallel_on_all_devices
from distman.environments import first_host as _first_host_from_slurm_nodelist
from distman.executor import as_cpu as _as_cpu

__all__ = [
    "Callback",
    "DataLoaderType",
    "EarlyStopping",
    "EpochTimer",
    "LearningRateMonitor",
    "LoggingMode",
    "ModelCheckpoint",
    "ModelType",
    "NNHandler",
    "ParallelExecutor",
    "ParamScheduler",
    "ParameterNormMonitor",
    "Sampler",
    "TensorBoardLogger",
    "WandbLogger",
    "__version__",
    "_as_cpu",
    "_first_host_from_slurm_nodelist",
    "_initialize_distributed",
    "_is_env_distributed",
    "_pick_device",
    "_resolve_device",
    "_should_use_distributed",
    "aggregate_loss",
    "aggregate_metrics",
    "broadcast_data",
    "broadcast_if_ddp",
    "broadcast_tensor",
    "denoising_score_matching",
    "initialize_ddp",
    "initialize_logger",
    "make_train_val_indices",
    "on_rank",
    "parallel_on_all_devices",
    "parallelize_on_gpus",
]


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise error_of_missing(f"{name} of NNHandler is not here. {REFUSED[name]}", sys._getframe(1))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
