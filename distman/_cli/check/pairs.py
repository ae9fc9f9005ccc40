"""Which ranks talk to which when links are measured, and which measured times are out of the ordinary: arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
Pair = tuple[int, int]
_MAX_ALL_PAIRS = 16  # ranks up to which every pair is measured
_MAX_ROUNDS = 31  # as many as all pairs of 32 ranks would take: a few seconds, however large the job


def tournament(players: Sequence[int]) -> list[list[Pair]]:
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


def plan_rounds(nodes: Sequence[int]) -> list[list[Pair]]:
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


def find_slow(seconds: Mapping[K, float], *, margin: float, factor: float = 3.0) -> list[K]:
    """Return whose time is above the median by a factor, and by seconds that somebody would notice, slowest first.

    >>> find_slow({"n1": 0.01, "n2": 0.011, "n3": 0.2}, margin=0.001)
    ['n3']
    """
    if not seconds:
        return []
    median = statistics.median_low(seconds.values())
    limit = max(factor * median, median + margin)
    return sorted((key for key, value in seconds.items() if value > limit), key=lambda key: -seconds[key])
