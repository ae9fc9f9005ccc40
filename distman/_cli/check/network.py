"""How fast the links between ranks are: pairs of them send back and forth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distman._cli.own_job import gather_reports
from distman._cli.timing import timed
from distman._coordination.wait_scope import collective
from distman.manager import DistributedManager

_MAX_ALL_PAIRS = 16  # ranks up to which every pair is measured
_MAX_ROUNDS = 31  # as many as all pairs of 32 ranks would take: a few seconds, however large the job

_SMALL_TRIPS, _LARGE_TRIPS = 20, 8  # of which the fastest counts: a few find a quiet moment
_SMALL_BYTES, _LARGE_BYTES = 8, 1 << 20
_TAG = 0x636B  # keeps our messages from meeting those of the program


@dataclass(frozen=True)
class Link:
    """Two ranks, the lower first, and the shortest times that a message took between them, one way."""

    first: int
    second: int
    latency: float  # seconds for 8 bytes
    seconds: float  # seconds for 1 MiB


@collective
def measure_links(manager: DistributedManager) -> list[Link] | None:
    """Return on rank 0 how fast the links between ranks are; disjoint pairs measure at once. Collective."""
    mine: list[Link] = []
    for pairs in plan_rounds([peer.node_rank for peer in manager.roll_call]):
        for pair in pairs:
            if manager.rank in pair:
                latency = _shortest_trip(pair, _SMALL_BYTES, _SMALL_TRIPS, manager) / 2
                seconds = _shortest_trip(pair, _LARGE_BYTES, _LARGE_TRIPS, manager) / 2
                if manager.rank == pair[0]:
                    mine.append(Link(*pair, latency, seconds))
    reports = gather_reports(manager, "links", mine, list[Link])
    return None if reports is None else [link for links in reports for link in links]


def tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which each player meets each other one once."""
    # The circle method: one player stays in place, the others go round; of an odd number one rests in each round.
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


def _shortest_trip(pair: tuple[int, int], num_bytes: int, num_trips: int, manager: DistributedManager) -> float:
    """Return the seconds of the shortest of several round trips between two ranks, this one among them."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=manager.device)
    other = sum(pair) - manager.rank
    ways = [dist.send, dist.recv] if manager.rank == pair[0] else [dist.recv, dist.send]

    def go() -> None:
        for way in ways:
            way(message, other, tag=_TAG)

    timed(go, manager.device)  # the first message connects, and waits for the other rank
    return min(timed(go, manager.device) for _ in range(num_trips))
