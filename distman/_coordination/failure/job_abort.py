"""Making a launcher end the whole job where it would not do so by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distman._base import timing
from distman._base.process_tree import runs_same_program, stat_of
from distman._coordination.failure import hook
from distman._coordination.failure.record import SILENT
from distman.environments import LAUNCHERS, LaunchEnvironment, OnFailure
from distman.errors import JobFailed, RendezvousError

_PMI_ABORT = b"cmd=abort exitcode=1\n"


def abort_job_after(
    error: BaseException,
    environment: LaunchEnvironment,
    *,
    is_beside: bool = False,  # it tells of a rank that runs on this host, which is ended if it is stopped
) -> None:
    """Let the launcher end the whole job once this process ends because of an error, if it must be asked to.

    A launcher that ignores exit codes is asked by every rank. One that waits for every rank would wait for ever for one
    that is stopped or never came: then the ranks cancel the job, in turn.
    """
    if environment.world_size == 1:
        return
    is_silent = isinstance(error, JobFailed) and error.error_type == SILENT
    if isinstance(error, JobFailed) and is_silent and is_beside:
        hook.end_job_at_exit(functools.partial(_end_if_stopped, error.pid))
    end_job = ending_of(environment, seconds_before_turn(environment.rank, environment.world_size))
    ignores_codes = LAUNCHERS[environment.launcher].on_failure is OnFailure.NEEDS_ABORT
    if end_job is not None and (ignores_codes or is_silent or isinstance(error, RendezvousError)):
        hook.end_job_at_exit(end_job)


def ending_of(environment: LaunchEnvironment, before: float = 0.0) -> Callable[[], None] | None:
    """Return what ends the job at the end of this process, where the launcher waits for every rank and can be asked."""
    launcher = LAUNCHERS[environment.launcher]
    if launcher.on_failure is OnFailure.NEEDS_ABORT:
        return _abort
    if launcher.cancel_command:
        return functools.partial(_cancel, launcher.cancel_command, timing.CANCEL + before)
    return None


def seconds_before_turn(rank: int, world_size: int) -> float:
    """Return how long a rank leaves it to others to end the job, all of which end with it: any of them may be stuck.

    The ranks 0, 1, 2, 4, 8 and so on have a turn each, since not all of them are on the first host. The others come
    last, and at once, so that nobody waits long and the scheduler is not flooded.
    """
    is_early = rank & (rank - 1) == 0
    return timing.CANCEL_TURN * (rank.bit_length() if is_early else world_size.bit_length() + 1)


def _end_if_stopped(pid: int) -> None:
    """End a process that is stopped, if it runs this very program: nothing else would end it."""
    time.sleep(timing.STOPPED)
    with contextlib.suppress(OSError):
        _, (state, *_) = stat_of(Path("/proc", str(pid)))
        if state == "T" and runs_same_program(pid):
            os.kill(pid, signal.SIGKILL)


def _abort() -> None:
    """Ask the launcher over PMI to end the job, as ``MPI_Abort`` does; else die of a signal, which it notices.

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


def _cancel(cancel_command: Callable[[Mapping[str, str]], Sequence[str]], grace: float) -> None:
    command = list(cancel_command(os.environ))
    if not command:
        return
    time.sleep(grace)
    try:
        subprocess.run(command, check=False, timeout=timing.CANCEL_COMMAND)
    except (OSError, subprocess.TimeoutExpired) as error:
        hook.write(f"distman: a rank still runs: {error}. End it: {shlex.join(command)}")
