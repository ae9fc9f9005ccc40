"""How a dim of a field is cut into shards, at every resolution that a model computes it at."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distman.collectives import GroupLike, resolve_group

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


def neighbours(group: GroupLike = None, *, periodic: bool = False) -> tuple[int | None, int | None]:
    """Return the ranks before and behind this one in a group, such as along an axis of a mesh.

    Local.

    Args:
        group: The name of the axis, a process group, or None for the world.
        periodic: Whether the first rank and the last one are neighbours, too.

    Returns:
        Two ranks of the world; None beyond an end.

    Example on two ranks:
        >>> all_gather_objects(neighbours("world")), neighbours("world", periodic=True) == (1 - rank, 1 - rank)
        ([(None, 1), (0, None)], True)
    """
    members = resolve_group(group)
    ends = (members.ranks[-1], members.ranks[0]) if periodic else (None, None)
    around = (ends[0], *members.ranks, ends[1])
    return around[members.rank], around[members.rank + 2]


def weighted_sizes(length: int, weights: Sequence[float]) -> list[int]:
    """Return the sizes of parts of a length in proportion to weights.

    Local.

    Args:
        length: Length of the dim.
        weights: For each part, a number of 0 or more, such as the speed of its rank.

    Raises:
        ValueError: A weight is negative, or all are 0.

    Example:
        >>> weighted_sizes(10, [1, 3])
        [2, 8]
    """
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ValueError(f"weights must be 0 or more, and one above 0, got {list(weights)}. Pass one for each part.")
    ends = [round(length * part / total) for part in itertools.accumulate(weights)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]
