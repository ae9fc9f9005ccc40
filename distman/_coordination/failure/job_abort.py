"""Making a launcher end the whole job where it would not do so by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from distman._coordination.failure import hook
from distman._coordination.failure.record import SILENT
from distman.environments import LaunchEnvironment
from distman.errors import RankFailedError, RendezvousError

_DEAF_TO_EXIT_CODES = ("hydra", "mvapich")
_PMI_ABORT = b"cmd=abort exitcode=1\n"
_NUM_CANCELLING = 2  # ranks: one of them may be the one that is stopped
_GRACE = 3.0  # seconds for the others to say why they end, before the step is cancelled
_PATIENCE = 10.0  # seconds for scancel, whose controller may be busy


def abort_job_after(error: BaseException, environment: LaunchEnvironment) -> None:
    """Let the launcher end the whole job once this process ends because of an error, if it needs to be told.

    Hydra ignores a rank that exits with an error. A plain ``srun`` waits for every task, for one
    that is stopped or was never heard of too: then two ranks cancel the job step. A process of this host that is
    stopped is ended.

    Args:
        error: Why this process ends.
        environment: What the launcher said.
    """
    if environment.world_size == 1:
        return
    actions: list[Callable[[], None]] = []
    if isinstance(error, RankFailedError) and error.error_type == SILENT and error.host == socket.gethostname():
        actions.append(functools.partial(_end_if_stopped, error.pid))
    if environment.launcher in _DEAF_TO_EXIT_CODES:
        actions.append(_abort)
    elif environment.launcher == "slurm" and environment.rank < _NUM_CANCELLING and _leaves_a_task_behind(error):
        actions.append(_cancel_step)
    for action in actions:
        hook.end_job_at_exit(action)


def _leaves_a_task_behind(error: BaseException) -> bool:
    return isinstance(error, RendezvousError) or (isinstance(error, RankFailedError) and error.error_type == SILENT)


def _end_if_stopped(pid: int) -> None:
    """End a process that is stopped, if it runs this very program: it would stay behind for ever."""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        state = (process / "stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
        if state == "T" and (process / "cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _abort() -> None:
    """Tell a launcher over PMI to end the job, as ``MPI_Abort`` does; else die of a signal, which it notices.

    Source:
        PMI version 1, wire protocol, command ``abort``; the descriptor is handed over as ``PMI_FD``.
    """
    try:
        descriptor = int(os.environ.get("PMI_FD", ""))
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.write(descriptor, _PMI_ABORT)
            return
    except (OSError, ValueError):
        pass  # no PMI: the signal is what is left
    os.kill(os.getpid(), signal.SIGKILL)


def _cancel_step() -> None:
    time.sleep(_GRACE)  # the others end by themselves meanwhile, and say why
    step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    try:
        subprocess.run(["scancel", "--quiet", step], check=False, timeout=_PATIENCE)  # noqa: S607 - where Slurm is, varies
    except (OSError, subprocess.TimeoutExpired) as error:
        hook.write(f"distman: a task of step {step} is left behind ({error}). End it: scancel {step}")
