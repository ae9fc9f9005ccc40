"""Stretches of a sharded dim that change their places: mirror images, and other lengths of the shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from distman._job.groups.registry import Group
from distman.collectives import exchange, new_empty
from distman.fft._resharding import execute


class Stretch(NamedTuple):
    """Neighbours along the full dim: where they start, and where they start in the result."""

    source: int
    target: int
    length: int
    is_reversed: bool = False


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """Stretches of one dim that change their places; what changes its rank is sent straight to it."""

    dim: int
    sizes: tuple[int, ...]
    out_sizes: tuple[int, ...]
    stretches: tuple[Stretch, ...]  # with neither sources nor targets that overlap; the rest of the result is zero
    group: Group

    def adjoint(self) -> Rearrangement:
        stretches = tuple(one._replace(source=one.target, target=one.source) for one in self.stretches)
        return dataclasses.replace(self, sizes=self.out_sizes, out_sizes=self.sizes, stretches=stretches)

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        rank, ranks = self.group.rank, range(self.group.size)
        shape = list(tensor.shape)
        shape[self.dim] = self.out_sizes[rank]
        result = tensor.new_zeros(shape)
        outgoing = [list(self._pieces(rank, other)) for other in ranks]
        incoming = [list(self._pieces(other, rank)) for other in ranks]
        sends = [self._join(tensor, [(one.source, one.length) for one in pieces]) for pieces in outgoing]
        receives = []
        for pieces in incoming:
            shape[self.dim] = sum(one.length for one in pieces)
            receives.append(new_empty(tensor, shape))
        receives[rank] = sends[rank]
        exchange(sends, receives, self.group)
        for pieces, received in zip(incoming, receives, strict=True):
            for one, part in zip(
                pieces, received.split_with_sizes([one.length for one in pieces], self.dim), strict=True
            ):
                part = part.flip(self.dim) if one.is_reversed else part
                result.narrow(self.dim, one.target, one.length).copy_(part)
        return result

    def _join(self, tensor: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
        if not runs:
            return tensor.narrow(self.dim, 0, 0)
        parts = [tensor.narrow(self.dim, *run) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def _pieces(self, sender: int, receiver: int) -> Iterator[Stretch]:
        """Yield what one rank sends another, as stretches that begin in the one's shard and end in the other's."""
        first, end = _interval(self.sizes, sender)
        out_first, out_end = _interval(self.out_sizes, receiver)
        for source, target, length, is_reversed in self.stretches:
            # How far into the stretch the receiver's part of it starts and ends, counted at the source.
            near, far = out_first - target, out_end - target
            if is_reversed:
                near, far = length - far, length - near
            low = max(source, first, source + near)
            high = min(source + length, end, source + far)
            if low < high:
                place = source + length - high if is_reversed else low - source
                yield Stretch(low - first, target + place - out_first, high - low, is_reversed)


def _interval(sizes: tuple[int, ...], rank: int) -> tuple[int, int]:
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


def resized(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int], out_sizes: Sequence[int], group: Group
) -> torch.Tensor:
    """Return a tensor in shards of other lengths; what is too long is cut off, what is missing is zero."""
    if list(sizes) == list(out_sizes):
        return tensor
    stretch = Stretch(0, 0, min(sum(sizes), sum(out_sizes)))
    return execute(tensor, Rearrangement(dim, tuple(sizes), tuple(out_sizes), (stretch,), group))
