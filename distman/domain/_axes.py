"""How a dim of a field is cut into shards, and which stretches of it a rank takes from whom.

Arithmetic, which comes out the same on every rank.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

_ATTRIBUTE = "_domain_layout"


@dataclass(frozen=True)
class Axis:
    """A dim that is split over the ranks of a group.

    The cuts are those of the field that a model was given, the last one its length. Fields of other lengths are cut in
    proportion, so all fields of one length are cut alike, whatever layers they have come through.
    """

    group: dist.ProcessGroup | str | None
    length: int
    cuts: tuple[int, ...]
    dim: int = -1  # of the field that the model was given

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each rank's shard ends."""
        total = max(self.cuts[-1], 1)
        return (*(-(-self.length * cut // total) for cut in self.cuts[:-1]), self.length)

    @property
    def intervals(self) -> list[tuple[int, int]]:
        return list(zip((0, *self.ends), self.ends, strict=False))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in self.intervals)

    def resized(self, length: int) -> Axis:
        return dataclasses.replace(self, length=length)


Layout = dict[int, Axis]  # the split dims of a tensor, counted from its end: -1 is the last


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return how a tensor is split; empty if it is not, or nobody knows."""
    found: Layout = getattr(tensor, _ATTRIBUTE, {})
    return found


def set_layout(tensor: torch.Tensor, layout: Layout) -> None:
    setattr(tensor, _ATTRIBUTE, layout)


Boundary = Literal["zeros", "circular", "reflect", "replicate", "none"]
BOUNDARIES = ("zeros", "circular", "reflect", "replicate", "none")
_MAX_SHOWN = 16  # ranks; the windows of more would take longer to write down than to send


class Run(NamedTuple):
    """Neighbouring entries of a shard, and where they go in a window."""

    source: int  # the first of them in the shard
    target: int  # where the run starts in the window
    length: int  # entries of the window
    step: int = 1  # -1: in reverse order; 0: one entry of the shard, repeated

    @property
    def num_sent(self) -> int:
        return self.length if self.step else 1


Runs = dict[int, list[Run]]  # by the rank at the other end


@dataclass(frozen=True)
class Windows:
    """The window of each rank on a dim of which each rank has a shard.

    A window that leaves the field continues as the boundary says: beyond "zeros" there are zeros.
    """

    sizes: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    boundary: Boundary = "zeros"

    @functools.cached_property
    def text(self) -> str:
        """What tells the messages of two calls apart."""
        text = f"sizes {list(self.sizes)} windows {list(self.bounds)}"
        return f"{self.boundary} " + (text if len(self.sizes) <= _MAX_SHOWN else f"{zlib.crc32(text.encode())}")

    def length(self, rank: int) -> int:
        start, end = self.bounds[rank]
        return end - start


def halo_windows(sizes: Sequence[int], before: int, after: int, boundary: Boundary) -> Windows:
    """Return the windows that hold each shard and its halos; with "none" they end where the field does."""
    ends = list(itertools.accumulate(sizes))
    bounds = [(end - size - before, end + after) for size, end in zip(sizes, ends, strict=True)]
    if boundary == "none":
        bounds = [(max(start, 0), min(end, ends[-1])) for start, end in bounds]
    return Windows(tuple(sizes), tuple(bounds), boundary)


def longest_halo(boundary: Boundary, length: int) -> int:
    """Return how wide halos may be at the ends of a field, by torch's rules for padding."""
    return {"reflect": max(length - 1, 0), "circular": length}.get(
        boundary, 0 if boundary == "replicate" and not length else sys.maxsize
    )


@functools.lru_cache(maxsize=512)
def plan(windows: Windows, rank: int) -> tuple[Runs, Runs, list[tuple[int, int]]]:
    """Return what a rank takes from whom, what it gives to whom, and the stretches of its window that are zero."""
    starts = [0, *itertools.accumulate(windows.sizes)]
    incoming: Runs = {}
    outgoing: Runs = {}
    for receiver, bounds in enumerate(windows.bounds):
        for owner, run in _pieces(bounds, starts, windows.boundary):
            if receiver == rank:
                incoming.setdefault(owner, []).append(run)
            if owner == rank:
                outgoing.setdefault(receiver, []).append(run)
    covered = [(run.target, run.target + run.length) for runs in incoming.values() for run in runs]
    return incoming, outgoing, gaps(covered, windows.length(rank))


def gaps(covered: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return the stretches of a length that intervals, which may overlap, leave."""
    found, place = [], 0
    for start, end in [*sorted(covered), (length, length)]:
        if start > place:
            found.append((place, start))
        place = max(place, end)
    return found


def _pieces(bounds: tuple[int, int], starts: Sequence[int], boundary: Boundary) -> Iterator[tuple[int, Run]]:
    """Yield the runs of a window with their owners, counted within the owners' shards."""
    for run in runs_of(*bounds, starts[-1], boundary):
        end = run.source + run.num_sent
        owner = bisect.bisect_right(starts, run.source) - 1
        while owner < len(starts) - 1 and starts[owner] < end:
            low, high = max(run.source, starts[owner]), min(end, starts[owner + 1])
            if low < high:
                place = end - high if run.step < 0 else low - run.source
                length = high - low if run.step else run.length
                yield owner, Run(low - starts[owner], run.target + place, length, run.step)
            owner += 1


def runs_of(start: int, end: int, length: int, boundary: Boundary) -> Iterator[Run]:
    """Yield the runs of the full field, of this length, that fill a window."""
    if boundary == "circular":
        place = start
        while place < end:
            source = place % length
            num = min(end - place, length - source)
            yield Run(source, place - start, num)
            place += num
        return
    first, last = max(start, 0), min(end, length)
    if first < last:
        yield Run(first, first - start, last - first)
    left, right = min(end, 0), max(start, length)  # where what is before the field ends, and what is behind it starts
    if boundary == "reflect":
        if start < left:
            yield Run(1 - left, 0, left - start, -1)
        if right < end:
            yield Run(2 * length - 1 - end, right - start, end - right, -1)
    if boundary == "replicate":
        if start < left:
            yield Run(0, 0, left - start, 0)
        if right < end:
            yield Run(length - 1, right - start, end - right, 0)
