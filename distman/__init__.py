"""Works out which rank of a PyTorch job this process is, connects the ranks, and tells all of them when one fails.

::

    from distman import DistributedManager

    DistributedManager.initialize()        # once, at the start of the script
    manager = DistributedManager()         # anywhere: the same state
    manager.rank, manager.world_size, manager.device

What is imported from here; ``help(distman.on_rank)``, say, tells more::

    DistributedManager       the place of this process in its job, groups of ranks, barriers, DDP and FSDP, stops
    Peer                     what is known of another rank
    explain                  which launcher has started this process, and why that is believed
    pick_device              the device of a rank, by its place on its host
    resolve_device           the device that a text names
    split_sizes              balanced parts of a length
    run                      call a function on several ranks of this machine
    Stepper                  gradients and steps that are the same on all ranks, for a loop of your own
    ParallelExecutor         call a function on every device of this machine, without a job
    parallel_on_all_devices  a function of tensors on all GPUs of this process

    on_rank, rank_zero_only, on_local_rank    let a function run on some ranks, while the others wait
    rank_zero_first, local_rank_zero_first    let one rank run through a block before the others
    SlowRank                                  a rank that all others wait for, of DistributedManager.slow_ranks()
    surviving_failure                         go on after the failure of another rank

    JobFailed                another rank has failed, and with it the job
    DistmanError             the base of all others: BarrierTimeoutError, CheckpointError, DivergenceError,
                             LaunchEnvironmentError, NonFiniteLossError, NotInitializedError, PlanMismatchError,
                             RankFailedError, RendezvousError, UndefinedGroupError, WorkerError, WorkerDiedError

The rest is in the packages: collectives, mappings, fft, domain, metrics, data, checkpoint, handler, score, and testing.
"""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from distman import _startup
from distman._base.public_names import PACKAGES, missing_name
from distman._version import VERSION as __version__  # noqa: F401, N811 - for users, by its name everywhere
from distman.environments import explain
from distman.errors import (
    BarrierTimeoutError,
    CheckpointError,
    DistmanError,
    DivergenceError,
    JobFailed,
    LaunchEnvironmentError,
    NonFiniteLossError,
    NotInitializedError,
    PlanMismatchError,
    RankFailedError,
    RendezvousError,
    UndefinedGroupError,
    WorkerDiedError,
    WorkerError,
)
from distman.topology import split_sizes

if TYPE_CHECKING:
    from distman._cli.run.function import run
    from distman._coordination.monitor.slowness import SlowRank
    from distman._coordination.surviving import surviving_failure
    from distman._job.device import pick_device, resolve_device
    from distman._job.meeting.peers import Peer
    from distman.decorators import (
        local_rank_zero_first,
        on_local_rank,
        on_rank,
        parallel_on_all_devices,
        rank_zero_first,
        rank_zero_only,
    )
    from distman.environments import (
        is_env_distributed as is_env_distributed,
        should_use_distributed as should_use_distributed,
    )
    from distman.executor import ParallelExecutor, parallelize_on_gpus as parallelize_on_gpus
    from distman.manager import DistributedManager, initialize_ddp as initialize_ddp
    from distman.topology import ProcessGroupConfig as ProcessGroupConfig, ProcessGroupNode as ProcessGroupNode
    from distman.training import Stepper

__all__ = [
    "BarrierTimeoutError",
    "CheckpointError",
    "DistmanError",
    "DistributedManager",
    "DivergenceError",
    "JobFailed",
    "LaunchEnvironmentError",
    "NonFiniteLossError",
    "NotInitializedError",
    "ParallelExecutor",
    "Peer",
    "PlanMismatchError",
    "RankFailedError",
    "RendezvousError",
    "SlowRank",
    "Stepper",
    "UndefinedGroupError",
    "WorkerDiedError",
    "WorkerError",
    "explain",
    "local_rank_zero_first",
    "on_local_rank",
    "on_rank",
    "parallel_on_all_devices",
    "pick_device",
    "rank_zero_first",
    "rank_zero_only",
    "resolve_device",
    "run",
    "split_sizes",
    "surviving_failure",
]

# Names that load torch, and names that earlier libraries gave to what is not on page one.
_ON_DEMAND = {
    "distman._cli.run.function": ("run",),
    "distman._coordination.monitor.slowness": ("SlowRank",),
    "distman._coordination.surviving": ("surviving_failure",),
    "distman._job.device": ("pick_device", "resolve_device"),
    "distman._job.meeting.peers": ("Peer",),
    "distman.decorators": (
        "local_rank_zero_first",
        "on_local_rank",
        "on_rank",
        "parallel_on_all_devices",
        "rank_zero_first",
        "rank_zero_only",
    ),
    "distman.environments": ("is_env_distributed", "should_use_distributed"),
    "distman.executor": ("ParallelExecutor", "parallelize_on_gpus"),
    "distman.manager": ("DistributedManager", "initialize_ddp"),
    "distman.topology": ("ProcessGroupConfig", "ProcessGroupNode"),
    "distman.training": ("Stepper",),
}
_NEAR = 3  # callers among which help() is: two functions of ``inspect``, and then ``pydoc``


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(f"distman.{name}")
    home = next((home for home, names in _ON_DEMAND.items() if name in names), None)
    if home is None:
        raise missing_name(name, sys._getframe(1))
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is not None and frame.f_code.co_name == "docmodule":
            return []  # help() would print each name in full, thousands of lines; the docstring has them all
        frame = frame and frame.f_back
    return sorted({*__all__, *PACKAGES, *(name for name in globals() if name.startswith("__"))})


_startup.watch()
