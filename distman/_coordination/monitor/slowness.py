"""Which rank holds up the steps of all, and by what: told from the times of each rank, without a collective.

Where ranks wait for each other, the steps of all take equally long. A slow rank takes longer than the others for
something of its own, and for all that is its own. Whatever else the machine does may spoil a window of some steps, so
several windows are looked at, the more of them, the more they differ by themselves.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._base import timing
from distman._base.log import logger
from distman._coordination import protocol
from distman._coordination.failure.record import Place
from distman._coordination.messages import decode, decode_at_once, read_numbers
from distman._coordination.step_times import APART, COMPARED, WAITING, current

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_STEPS = 5  # in a window at least
_FEWEST_WINDOWS = 6  # by which a rank may be judged: fewer do not tell how noisy the machine is
_NUMBERS = (4, 8, 16, 32)  # of the latest windows that are looked at together: a noisy machine takes more of them
_NOISES = 7.0  # times the noise of so many windows, by which a rank has to be slower
_FACTOR = 1.15  # by which a slow rank takes longer for something than the median of the others, at least
_SHARE = 0.05  # of a step that this costs at least: what takes longer and costs less holds up nobody
_MENDED = 0.5  # of these two: a rank that takes no more than that longer in four windows in a row is slow no more
_SHORTEST = 1e-6  # what the others need no time for does not take a rank infinitely many times as long


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer for its part of each step than the others, which wait for it.

    Attributes:
        rank: The rank.
        host: Name of its host.
        phase: What takes longer there: ``"loading"``, ``"forward"``, ``"backward"``, or ``"computing"`` for all else.
        factor: How many times as long as on the other ranks, by the median, when the rank was found to be slow.

    Example:
        >>> SlowRank(rank=2, host="n3", phase="loading", factor=1.34)
        SlowRank(rank=2, host='n3', phase='loading', factor=1.34)
    """

    rank: int
    host: str
    phase: str
    factor: float


_WORKING = APART + 1  # where in a window all is added up that a rank does itself


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A window of a rank beside those of the others, in seconds: by phase, and last for all that is its own."""

    excess: Sequence[float]
    usual: Sequence[float]  # the median of the others
    step: float
    is_sure: bool  # the ranks wait in what is timed


class SlownessWatch:
    """Tells rank 0 where the time of this rank's steps goes; there, compares the times of all ranks."""

    def __init__(self, rank: int, peers: Sequence[Place]) -> None:
        self._rank = rank
        self._peers = peers
        self._number = 0  # of the last window of this rank
        self._seen: dict[int, float] = {}  # the numbers of the windows of all ranks
        self._compared: dict[int, deque[_Comparison]] = defaultdict(lambda: deque(maxlen=_NUMBERS[-1]))
        self._slow: dict[int, tuple[str, float]] = {}  # phase and factor
        self._next_look = 0.0

    def look(self, store: TorchStore) -> None:
        """Tell of a window that has ended, and on rank 0 of ranks that have become slow, or are slow no more."""
        window = current().read(_STEPS, timing.SLOW_WINDOW)
        if window is not None:
            self._number += 1
            store.set(protocol.step_times(self._rank), json.dumps([self._number, *window]))
            if self._number == 1:
                store.append(protocol.TIMED, f"{self._rank},")
        if self._rank == 0 and self._number and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + timing.SLOW_EVERY_PER_RANK * len(self._peers)
            self._compare(store)

    def _compare(self, store: TorchStore) -> None:
        timed = read_numbers(store, protocol.TIMED)
        found = store.multi_get([protocol.step_times(one) for one in timed])
        told = {
            rank: decode(data, list[float], f"the times of rank {rank}")
            for rank, data in zip(timed, found, strict=True)
        }
        windows = {rank: [*window, sum(window[: len(COMPARED)])] for rank, (_, *window) in told.items()}
        columns = [sorted(column) for column in zip(*windows.values(), strict=True)]
        for rank, window in windows.items():
            number = told[rank][0]
            if len(told) > 1 and number != self._seen.get(rank):
                self._seen[rank] = number
                self._compared[rank].append(_beside_others(window, columns))
                self._conclude(store, rank, [*self._compared[rank]])

    def _conclude(self, store: TorchStore, rank: int, windows: Sequence[_Comparison]) -> None:
        """Log, and let all ranks know, that a rank has become slow, or is slow no more."""
        peer = self._peers[rank]
        if rank in self._slow:
            if not _is_mended(COMPARED.index(self._slow[rank][0]), windows):
                return
            del self._slow[rank]
            logger.info("%s is not slow any more", peer)
        else:
            finding = _judge(windows)
            if finding is None:
                return
            self._slow[rank] = finding
            logger.warning("%s is slow: %s takes %.2f times as long as on the other ranks", peer, *finding)
        slow = [(rank, phase, factor) for rank, (phase, factor) in self._slow.items()]
        store.set(protocol.SLOW_RANKS, json.dumps(slow))


def _beside_others(window: Sequence[float], columns: Sequence[Sequence[float]]) -> _Comparison:
    """Compare a window with those of all ranks, which are sorted, one column for each phase."""
    own = [*window[: len(COMPARED)], window[_WORKING]]
    usual = [_of_others(columns[at], window[at]) for at in (*range(len(COMPARED)), _WORKING)]
    excess = [mine - theirs for mine, theirs in zip(own, usual, strict=True)]
    return _Comparison(excess, usual, window[_WORKING] + window[WAITING], columns[WAITING][-1] > 0)


def _judge(windows: Sequence[_Comparison]) -> tuple[str, float] | None:
    """Return in what a rank is slow, if it is, and by which factor: where it loses the most time."""
    phases = [phase for phase in range(len(COMPARED)) if windows[-1].excess[phase] > _least(phase, windows[-1:])]
    for number in _NUMBERS if phases else ():
        latest = windows[-number:]
        if len(windows) < max(number, _FEWEST_WINDOWS):
            break
        excess, phase = max((_excess(phase, latest), phase) for phase in phases)
        changes = [abs(one.excess[phase] - other.excess[phase]) for one, other in itertools.pairwise(windows)]
        is_clear = excess > _least(phase, latest) and excess * number**0.5 > _NOISES * statistics.median(changes)
        in_all = statistics.median(one.excess[-1] for one in latest)
        if is_clear and (not latest[-1].is_sure or in_all > excess / 2):
            usual = statistics.median(one.usual[phase] for one in latest)
            return COMPARED[phase], round(1 + excess / max(usual, _SHORTEST), 2)
    return None


def _is_mended(phase: int, windows: Sequence[_Comparison]) -> bool:
    latest = windows[-_NUMBERS[0] :]
    return all(one.excess[phase] < _MENDED * _least(phase, latest) for one in latest)


def _excess(phase: int, windows: Sequence[_Comparison]) -> float:
    return sorted(one.excess[phase] for one in windows)[len(windows) // 4 - 1]


def _least(phase: int, windows: Sequence[_Comparison]) -> float:
    """Return the excess from which on a rank is slow."""
    usual = statistics.median(one.usual[phase] for one in windows)
    return max((_FACTOR - 1) * usual, _SHARE * statistics.median(one.step for one in windows))


def _of_others(column: Sequence[float], own: float) -> float:
    """Return the median of a sorted column without one of its numbers."""
    place, num_others = bisect_left(column, own), len(column) - 1
    low, high = (at + (place <= at) for at in ((num_others - 1) // 2, num_others // 2))
    return (column[low] + column[high]) / 2


def slow_ranks(store: TorchStore, hosts: Sequence[str]) -> tuple[SlowRank, ...]:
    found = decode_at_once(store, protocol.SLOW_RANKS, list[tuple[int, str, float]], "which ranks are slow") or []
    return tuple(SlowRank(rank, hosts[rank], phase, factor) for rank, phase, factor in sorted(found))
