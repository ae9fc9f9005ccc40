"""The end of a job that failed, under a launcher that would wait for ever for a rank that does nothing any more."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import seconds_before_turn
from distman._coordination.failure.record import SILENT, FailureRecord
from distman._coordination.messages import unless_malformed
from distman._coordination.monitor.context import WatchContext, late_after
from distman._coordination.monitor.peer_connection import connect, read_address

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_PATIENCE = 60.0  # seconds for handlers elsewhere, of which nobody knows; they get as long as work in the background
_PAUSE = 0.1  # seconds between two looks who is still there: short beside what a program needs to end
_NUM_BYTES = 4096  # that are read at once of what a neighbour tells, and thrown away
_MOST_READS = 100  # at a look: who tells without end is there


class LeftBehind:
    """Ends the job at the end of this process if a rank that does nothing would keep the launcher waiting.

    That is the rank that is silent, and those that have not read of the failure though others had the time to. Of the
    latter one may only be slow, so it gets the time for which a rank may be silent.

    It may outlive the job in this process, whose store it does not keep.
    """

    def __init__(
        self,
        context: WatchContext,
        record: FailureRecord,
        silence: float,
        end_job: Callable[[], None],
        *,
        is_awaited: bool = False,  # the rank that failed is gone, and the ends of all others wait for it nevertheless
    ) -> None:
        self._others = [place.rank for place in context.peers if place.rank != context.rank]
        self._late_after = late_after(len(context.peers))
        self._is_one_host = context.is_one_host
        self._turn = seconds_before_turn(context.rank, len(context.peers))
        self._end_job = end_job
        self._failed = record.rank
        self._is_awaited = is_awaited
        self._silent = {record.rank} if record.error_type == SILENT else set[int]()
        self._late: set[int] = set()
        self._late_until = time.monotonic() + silence
        self._addresses: dict[int, bytes] = {}

    def find(self, store: TorchStore) -> bool:
        """Find out who does not react, and where the others are; return whether there is anyone to wait for."""
        until = time.monotonic() + self._late_after
        late = set(self._others) - {self._failed}
        while (late := {rank for rank in late if is_unaware(store, rank)}) and time.monotonic() < until:
            time.sleep(_PAUSE)
        self._late = late
        is_anyone = bool(self._silent or self._late or self._is_awaited)
        if is_anyone:
            for rank in self._others:
                place = protocol.peer_address(rank)
                if store.check([place]) and not store.check([protocol.left(rank)]):
                    self._addresses[rank] = store.get(place)
        return is_anyone

    def end_job_without(self) -> None:
        """End the job once all others have ended or left it, if one is there that does nothing."""
        connections = self._connect()
        while True:
            there = {rank for rank, connection in connections.items() if connection is None or _is_open(connection)}
            late = there & self._late
            if not late and not there & self._silent and not self._is_awaited:
                break
            if there <= self._silent | self._late and (not late or time.monotonic() > self._late_until):
                self._end_job()
                break
            time.sleep(_PAUSE)
        for connection in connections.values():
            if connection is not None:
                connection.close()

    def end_job_unseen(self) -> None:
        """End the job where the store is silent too, after a minute: other ranks may be saving something."""
        if not hook.has_failed():
            time.sleep(_PATIENCE + self._turn)
            self._end_job()

    def _connect(self) -> dict[int, socket.socket | None]:
        """Return a connection to each rank that is there; None to one that is silent and whose host is, too."""
        found: dict[int, socket.socket | None] = dict.fromkeys(self._silent)
        for rank, address in self._addresses.items():
            read = unless_malformed(functools.partial(read_address, address, rank))
            if read is None:
                continue
            addresses, port, _ = read
            try:
                found[rank] = connection = connect(addresses, port, is_one_host=self._is_one_host)
                connection.settimeout(0)
            except ConnectionRefusedError:  # it is gone
                found.pop(rank, None)
            except OSError:  # its host is gone, or it cannot be told
                continue
        return found


def is_unaware(store: TorchStore, rank: int) -> bool:
    """Return whether a rank is in the job, and has not read of its failure: it would have deleted its sign of life."""
    return bool(store.check([protocol.beat(rank)])) and not store.check([protocol.left(rank)])


def _is_open(connection: socket.socket) -> bool:
    """Return whether the process at the other end is there, and in the job; what it tells is known already."""
    try:
        return all(connection.recv(_NUM_BYTES) for _ in range(_MOST_READS))
    except BlockingIOError:
        return True
    except OSError:  # reset: that, too, is the end
        return False
