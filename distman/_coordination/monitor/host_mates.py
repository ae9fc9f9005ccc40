"""Processes of this host that a failure does not reach: native code holds their interpreter, or they are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.record import SILENT, FailureRecord, Place
from distman._coordination.messages import MalformedMessageError, claim_rank
from distman._coordination.monitor.context import WatchContext, late_after
from distman._coordination.monitor.left_behind import is_unaware
from distman._coordination.timeouts import run_with_timeout

_PAUSE = 0.1  # seconds between two looks who is still there


class HostMates:
    """Ends the ranks of this host that do not react to a failure, where no launcher does."""

    def __init__(self, context: WatchContext, record: FailureRecord, seconds: float) -> None:
        self._store = context.store
        self._rank = context.rank
        self._size = len(context.peers)
        self._failed = record
        self._mates = [context.peers[rank] for rank in context.mates if rank != context.rank]
        self._until = time.monotonic() + seconds  # by when they must have come back to the interpreter

    def look_after(self) -> None:
        """See to it that this process ends them at its end, if there are any and no other rank does."""
        with contextlib.suppress(dist.DistError, MalformedMessageError):
            run_with_timeout(self._look, 2 * late_after(self._size))

    def _look(self) -> None:
        until = time.monotonic() + late_after(self._size)
        while self._unaware() and time.monotonic() < until:
            time.sleep(_PAUSE)
        if self._unaware() and self._is_keeper():
            hook.end_job_at_exit(self._end)

    def _is_keeper(self) -> bool:
        first = min(self._rank, *(mate.rank for mate in self._mates))
        what = "who ends the ranks of a host"
        return claim_rank(self._store, protocol.keeper(first), self._rank, self._size, what) == self._rank

    def _unaware(self) -> Sequence[Place]:
        """Return those that have not read of the failure: they would have deleted their sign of life."""
        return [mate for mate in self._mates if _is_there(mate) and self._is_unaware(mate)]

    def _is_unaware(self, mate: Place) -> bool:
        if mate.rank == self._failed.rank:
            return self._failed.error_type == SILENT
        return is_unaware(self._store, mate.rank)

    def _end(self) -> None:
        while (late := self._unaware()) and time.monotonic() < self._until:
            time.sleep(_PAUSE)
        for mate in late:
            hook.write(f"distman: {mate} has not reacted to the failure of rank {self._failed.rank}, and is ended")
            with contextlib.suppress(ProcessLookupError):
                os.kill(mate.pid, signal.SIGKILL)


def _is_there(mate: Place) -> bool:
    """Return whether a process of this host runs the program of this one: another one may have its number by now."""
    try:
        return Path(f"/proc/{mate.pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
