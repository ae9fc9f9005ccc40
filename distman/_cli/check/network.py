"""What two ranks find out by sending back and forth: how fast their link is, and how far their clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distman._cli.own_job import gather_reports
from distman._cli.timing import timed
from distman._coordination.wait_scope import collective
from distman.collectives import control_device
from distman.manager import DistributedManager

_MAX_ALL_PAIRS = 16  # ranks up to which every pair is measured
_MAX_ROUNDS = 31  # as many as all pairs of 32 ranks would take: a few seconds, however large the job

_SMALL_TRIPS, _LARGE_TRIPS, _CLOCK_TRIPS = 20, 8, 10  # of which the fastest counts: a few find a quiet moment
_SMALL_BYTES, _LARGE_BYTES = 8, 1 << 20
_TAG = 0x636B  # keeps our messages from meeting those of the program


@dataclass(frozen=True)
class Link:
    """Two ranks, the lower first, and the shortest times that a message took between them, one way."""

    first: int
    second: int
    latency: float  # seconds for 8 bytes
    seconds: float  # seconds for 1 MiB


@dataclass(frozen=True)
class ClockOffset:
    """How far a host's clock is ahead of rank 0's."""

    host: str
    rank: int  # the one on it that was asked
    seconds: float  # negative where it is behind
    uncertainty: float  # how much this may be wrong, in seconds


@collective
def measure_links(manager: DistributedManager) -> list[Link] | None:
    """Return on rank 0 how fast the links between ranks are, of the pairs in :func:`plan_rounds`. Collective.

    Disjoint pairs measure at once; the shortest of several times counts, which others disturb least.
    """
    mine: list[tuple[int, int, float, float]] = []
    for pairs in plan_rounds([peer.node_rank for peer in manager.roll_call]):
        for pair in pairs:
            if manager.rank in pair:
                latency, seconds = (
                    _shortest_trip(pair, num_bytes, num_trips, manager) / 2
                    for num_bytes, num_trips in ((_SMALL_BYTES, _SMALL_TRIPS), (_LARGE_BYTES, _LARGE_TRIPS))
                )
                if manager.rank == pair[0]:
                    mine.append((*pair, latency, seconds))
    reports = gather_reports(manager, "links", mine, list[tuple[int, int, float, float]])
    return None if reports is None else [Link(*row) for rows in reports for row in rows]


@collective
def measure_clocks(manager: DistributedManager) -> list[ClockOffset] | None:
    """Return on rank 0 how far the clock of each host is ahead of its own, asking the host's last rank. Collective."""
    offsets = []
    last = {peer.node_rank: rank for rank, peer in enumerate(manager.roll_call)}
    for rank in (rank for _, rank in sorted(last.items()) if rank != 0):
        if manager.rank == 0:
            trips = [_ask(rank, manager) for _ in range(_CLOCK_TRIPS)]
            seconds, uncertainty = clock_offset(trips)
            offsets.append(ClockOffset(manager.roll_call[rank].host, rank, seconds, uncertainty))
        elif manager.rank == rank:
            for _ in range(_CLOCK_TRIPS):
                _answer(manager)
    return offsets if manager.rank == 0 else None


def tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which each player meets each other one once.

    Of an odd number of players one rests in each round.

    Source:
        The circle method for round-robin tournaments: one player stays in place, the others go round.

    >>> tournament([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    size = len(players) + len(players) % 2
    seats = list(range(size))
    rounds = []
    for _ in range(size - 1):
        matches = [sorted((seats[i], seats[-1 - i])) for i in range(size // 2)]
        rounds.append([(players[a], players[b]) for a, b in sorted(matches) if b < len(players)])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def plan_rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of ranks, few enough for any number of ranks.

    Up to 16 ranks every pair is there. Of more ranks the neighbours in the ring are, and of the first ranks of the
    nodes all pairs, or the first 31 rounds of these: in each, every node has another partner.
    """
    size = len(nodes)
    if size <= _MAX_ALL_PAIRS:
        return tournament(range(size))
    leaders = [nodes.index(node) for node in sorted(set(nodes))]
    ring = [*([(rank, rank + 1) for rank in range(first, size - 1, 2)] for first in (0, 1)), [(0, size - 1)]]
    known = {pair for pairs in ring for pair in pairs}
    matches = [[pair for pair in pairs if pair not in known] for pairs in tournament(leaders)[:_MAX_ROUNDS]]
    return [*ring, *filter(None, matches)]


def clock_offset(trips: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return how far another clock is ahead, and how much this may be wrong, from questions and their answers.

    Of each question: when it left by this clock, what the other clock said, and when the answer was here, in seconds.
    The quickest answer counts: the other clock was read some time between question and answer.

    Source:
        F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989); RFC 5905 (NTP) in the same
        way takes the sample of the smallest delay.

    >>> clock_offset([(10.0, 15.25, 10.5), (11.0, 18.0, 15.0)])
    (5.0, 0.25)
    """
    left, theirs, back = min(trips, key=lambda trip: trip[2] - trip[0])
    return theirs - (left + back) / 2, (back - left) / 2


def _ask(rank: int, manager: DistributedManager) -> tuple[float, float, float]:
    question, answer = _clock_message(manager), _clock_message(manager)
    left = time.time()
    dist.send(question, rank, tag=_TAG)
    dist.recv(answer, rank, tag=_TAG)
    theirs = answer.item()
    return left, theirs, time.time()


def _answer(manager: DistributedManager) -> None:
    message = _clock_message(manager)
    dist.recv(message, 0, tag=_TAG)
    message.cpu()  # on a GPU it is here only now
    dist.send(message.fill_(time.time()), 0, tag=_TAG)


def _clock_message(manager: DistributedManager) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float64, device=control_device(manager.resolve_group(None)))


def _shortest_trip(pair: tuple[int, int], num_bytes: int, num_trips: int, manager: DistributedManager) -> float:
    """Return the seconds of the shortest of several round trips between two ranks, this one among them."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=manager.device)
    is_first = manager.rank == pair[0]
    other = pair[1] if is_first else pair[0]

    def go() -> None:
        for send in (is_first, not is_first):
            if send:
                dist.send(message, other, tag=_TAG)
            else:
                dist.recv(message, other, tag=_TAG)

    timed(go, manager.device)  # the first message connects, and waits for the other rank
    return min(timed(go, manager.device) for _ in range(num_trips))
