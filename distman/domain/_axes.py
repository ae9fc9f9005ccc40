"""How a dim of a field is cut into shards, and which entries of it a rank takes from whom: the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import WeakIdKeyDictionary

from distman.collectives import GroupLike, resolve_group

IntArray = npt.NDArray[np.int64]
Stretch = tuple[int, int]  # of a dim: where it starts and ends


@dataclass(frozen=True)
class Axis:
    """A dim that is split over the ranks of a group.

    The cuts are those of the field that a model was given, the last one its length. Fields of other lengths are cut in
    proportion, so all fields of one length are cut alike, whatever layers they have come through. Without cuts each
    rank has the whole.
    """

    group: GroupLike
    length: int
    cuts: tuple[int, ...] = ()
    dim: int = -1  # of the field that the model was given

    @functools.cached_property
    def intervals(self) -> list[Stretch]:
        """Where each rank's shard starts and ends."""
        total = max([1, *self.cuts[-1:]])
        ends = [*(-(-self.length * cut // total) for cut in self.cuts[:-1]), self.length]
        return list(itertools.pairwise([0, *ends]))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in self.intervals)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return resolve_group(self.group).rank if self.cuts else 0

    def part(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor that extends over the whole dim."""
        start, end = self.intervals[self.rank]
        return full.narrow(dim, start, end - start)

    def resized(self, length: int) -> Axis:
        return dataclasses.replace(self, length=length)


Layout = dict[int, Axis]  # the split dims of a tensor, counted from its end: -1 is the last

_layouts: MutableMapping[torch.Tensor, Layout] = WeakIdKeyDictionary()


def find_layout(tensor: torch.Tensor) -> Layout | None:
    """Return how a tensor is split, {} if it is whole; None if nobody knows."""
    found = _layouts.get(tensor)
    is_wrapped = found is None and tensor.grad_fn is not None  # the many that FSDP gathers parameters by are not
    return _of_same_numbers(tensor) if is_wrapped else found


def _of_same_numbers(tensor: torch.Tensor) -> Layout | None:
    """Return how other tensors of the same numbers are split, if all of them are split alike.

    A function that autograd wraps, such as FSDP's around its units, may return what it is given as a new tensor.
    """
    found: Layout | None = None
    place = _place_of(tensor)
    for other, layout in _layouts.items():
        if _place_of(other) == place is not None:
            if found is not None and found != layout:
                return None
            found = layout
    return found


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
    except RuntimeError:  # it has no memory, as within torch.vmap
        return None


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return how a tensor is split; empty if it is not, or nobody knows."""
    return find_layout(tensor) or {}


def set_layout(tensor: torch.Tensor, layout: Layout) -> None:
    _layouts[tensor] = layout


def axes_of(tensor: torch.Tensor, layout: Layout, num_dims: int) -> Layout:
    """Return how each of the last dims is cut, also those that are not."""
    return {dim: layout.get(dim) or Axis(None, tensor.shape[dim]) for dim in range(-num_dims, 0)}


Boundary = Literal["zeros", "circular", "reflect", "replicate", "none"]


@dataclass(frozen=True)
class Windows:
    """The window of each rank on a dim of which each rank has a shard.

    A window that leaves the field continues as the boundary says: beyond "zeros" there are zeros.
    """

    sizes: tuple[int, ...]
    bounds: tuple[Stretch, ...]
    boundary: Boundary = "zeros"

    @functools.cached_property
    def text(self) -> str:
        """What tells the messages of two calls apart."""
        return f"{self.boundary} {zlib.crc32(repr((self.sizes, self.bounds)).encode())}"

    def length(self, rank: int) -> int:
        start, end = self.bounds[rank]
        return end - start


class Plan(NamedTuple):
    """How a rank's window is filled, and what its shard fills."""

    kept: tuple[int, int, int]  # a stretch of its own shard: where it starts there and in the window, and its length
    incoming: dict[int, torch.Tensor]  # other places of the window, by the rank that has their entries
    outgoing: dict[int, torch.Tensor]  # other entries of the shard, by the rank whose window has them
    repeated: set[int]  # ranks whose windows have some of them more than once
    beyond: torch.Tensor  # places of the window that nothing fills


def longest_halo(boundary: Boundary, length: int) -> int:
    """Return how wide halos may be at the ends of a field, by torch's rules for padding."""
    most = {"reflect": max(length - 1, 0), "circular": length, "replicate": sys.maxsize if length else 0}
    return most.get(boundary, sys.maxsize)


@functools.lru_cache(maxsize=512)
@torch.inference_mode(mode=False)
def plan(windows: Windows, rank: int, device: torch.device) -> Plan:
    starts = [0, *itertools.accumulate(windows.sizes)]
    start, end = windows.bounds[rank]
    first = min(max(start, starts[rank]), end)
    num_kept = max(min(end, starts[rank + 1]) - first, 0)
    kept = (first - starts[rank], first - start, num_kept) if num_kept else (0, 0, 0)
    incoming, outgoing, repeated = {}, {}, set[int]()
    for receiver, bounds in enumerate(windows.bounds):
        is_within = bounds[0] >= 0 and bounds[1] <= starts[-1]
        if receiver != rank and is_within and (bounds[1] <= starts[rank] or bounds[0] >= starts[rank + 1]):
            continue  # the windows of many ranks, which have nothing of this one
        entries = places(*bounds, starts[-1], windows.boundary)
        owners = np.searchsorted(starts, entries, "right") - 1
        if receiver == rank:
            beyond = np.flatnonzero(owners < 0)
            owners[kept[1] : kept[1] + num_kept] = -1
            for owner in set(owners.tolist()) - {-1}:
                incoming[owner] = torch.from_numpy(np.flatnonzero(owners == owner)).to(device)
        mine = entries[owners == rank] - starts[rank]
        if len(mine):
            outgoing[receiver] = torch.from_numpy(mine).to(device)
        if len(np.unique(mine)) < len(mine):
            repeated.add(receiver)
    return Plan(kept, incoming, outgoing, repeated, torch.from_numpy(beyond).to(device))


def places(start: int, end: int, length: int, boundary: Boundary) -> IntArray:
    """Return which entries of a field of this length fill a window, by torch's rules for padding; -1: none does."""
    found, last = np.arange(start, end), length - 1
    if boundary == "circular":
        return found % max(length, 1)
    if boundary == "reflect":
        mirrored: IntArray = last - np.abs(last - np.abs(found))
        return mirrored
    if boundary == "replicate":
        return found.clip(0, last)
    return np.where((found < 0) | (found > last), -1, found)
