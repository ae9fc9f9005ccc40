"""The rows of the spectrum of real data that are worth computing, and how they are shared out.

Of a transform of real data over two or more dims, row ``n - k`` is the conjugate of row ``k`` with all other
frequencies negated. So half of the rows are computed, each by a rank that owns the row or its mirror image, and the
other half is read off.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distman._job.groups.registry import Group
from distman.collectives import exchange, new_empty, send_buffers
from distman.fft._blocks import Index, Run
from distman.topology import split_sizes

IntArray = npt.NDArray[np.int64]
Half = tuple[Index, torch.Tensor, torch.Tensor]  # place, rows, and their mirror images in reversed order


class Piece(NamedTuple):
    """Neighbours among the rows a rank computes, which, or whose mirror images, are neighbours at their owner too."""

    start: int  # counted among the rows that the rank computes
    length: int
    owner: int  # the size of the group where nobody owns them
    place: int  # among what the rank brings their owner
    is_image: bool  # it is their mirror images, whose order is reversed


@dataclasses.dataclass(frozen=True, eq=False)
class HermitianRows:
    """How the rows of a dim are shared out: which rank owns them, and which computes them.

    What a rank brings an owner, rows and mirror images, is sorted as the owner's rows are. A pair that nobody owns is
    not computed.
    """

    runs: tuple[tuple[Run, ...], ...]  # for each rank, the rows of the first half that it computes
    # where the rows of the first half are if the runs of all ranks follow each other; last, what nobody computes
    runs_in_order: tuple[Run, ...]
    num_computed: tuple[int, ...]  # by each rank
    pieces: tuple[Piece, ...]  # where this rank's rows go, their mirror images first; a row that is its own is in two
    outgoing: tuple[int, ...]  # how many rows this rank brings each one, and last, how many nobody owns
    incoming: tuple[tuple[Run, ...], ...]  # for each rank, where this rank's rows are that it computes

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, length: int, sizes: tuple[int, ...], rank: int) -> HermitianRows:
        size = len(sizes)
        owner = np.repeat(np.arange(size + 1), [*sizes, length - sum(sizes)])
        computer = _computers(length, owner, size)
        mine = np.flatnonzero(computer == rank)
        mirrored = (length - mine) % length
        held = np.union1d(mine, mirrored)  # sorted, and so are the owners of rows
        outgoing = np.bincount(owner[held], minlength=size + 1)
        place = np.full(length, -1)
        place[held] = np.arange(len(held)) - np.repeat(np.cumsum(outgoing) - outgoing, outgoing)

        owned = np.flatnonzero(owner == rank)
        source = computer[np.minimum(owned, length - owned)]
        runs = [_runs(np.flatnonzero(computer == other)) for other in range(size)]
        num_computed = [sum(number for _, number in one) for one in runs]
        starts = itertools.accumulate((number for one in runs for _, number in one), initial=0)
        by_row = sorted(zip((run for one in runs for run in one), starts, strict=False))
        rest = (sum(num_computed), len(computer) - sum(num_computed))
        return cls(
            runs=tuple(runs),
            runs_in_order=(*((start, number) for (_, number), start in by_row), rest),
            num_computed=tuple(num_computed),
            pieces=(
                *_pieces(owner[mirrored], place[mirrored], is_image=True),
                *_pieces(owner[mine], place[mine], is_image=False),
            ),
            outgoing=tuple(outgoing.tolist()),
            incoming=tuple(_runs(np.flatnonzero(source == other)) for other in range(size)),
        )

    def to_owners(self, halves: Iterable[Half], like: torch.Tensor, shape: Sequence[int], group: Group) -> torch.Tensor:
        """Bring rows, along dim 0, and mirror images, not yet conjugated, to the ranks that own them."""
        num_owned = sum(length for runs in self.incoming for _, length in runs)
        owned = new_empty(like, [num_owned, *shape])
        receives = [self._room(owned, runs) for runs in self.incoming]
        shapes = {other: [self.outgoing[other], *shape] for other in range(group.size) if other != group.rank}
        with send_buffers(like, shapes, group) as (buffers, segment):
            sends = [receives[rank] if rank == group.rank else buffers[rank] for rank in range(group.size)]
            for (rows, *others), direct, images in halves:
                for piece, part, place in self._parts(rows):
                    if piece.owner < group.size:
                        target = sends[piece.owner][(place, *others)]
                        if piece.is_image:
                            end = len(images) - part.start  # in their reversed order
                            torch.conj_physical(images[len(images) - part.stop : end], out=target)
                        else:
                            target.copy_(direct[part])
            exchange(sends, receives, group, segment=segment)
        for runs, received in zip(self.incoming, receives, strict=True):
            if len(runs) > 1:
                for (start, number), part in zip(runs, received.split([number for _, number in runs]), strict=True):
                    owned.narrow(0, start, number).copy_(part)
        return owned

    def to_computers(self, owned: torch.Tensor, group: Group) -> list[torch.Tensor]:
        """Bring owned rows to the ranks that compute with them and their mirror images; those nobody owns are zero."""
        sends = [_joined([owned.narrow(0, *run) for run in runs]) if runs else owned[:0] for runs in self.incoming]
        shape = owned.shape[1:]
        receives = [new_empty(owned, [number, *shape]) for number in self.outgoing[:-1]]
        receives[group.rank] = sends[group.rank]
        exchange(sends, receives, group)
        return [*receives, owned.new_zeros([self.outgoing[-1], *shape])]

    def halves(self, held: Sequence[torch.Tensor], index: Index) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some of the rows that ``to_computers`` brought, and their mirror images in reversed order."""
        rows, *others = index
        direct: list[torch.Tensor] = []
        images: list[torch.Tensor] = []
        for piece, _, place in self._parts(rows):
            (images if piece.is_image else direct).append(held[piece.owner][(place, *others)])
        return _joined(direct), _joined(images[::-1])

    @staticmethod
    def _room(owned: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        """Return the place of a rank's rows among the owned ones, or as much memory where they are apart."""
        if len(runs) == 1:
            return owned.narrow(0, *runs[0])
        return new_empty(owned, [sum(number for _, number in runs), *owned.shape[1:]])

    def _parts(self, rows: slice) -> Iterator[tuple[Piece, slice, slice]]:
        """Yield the pieces that some rows are in; with each, which of them, and where its owner has these."""
        for piece in self.pieces:
            end = piece.start + piece.length
            low, high = max(piece.start, rows.start), min(end, rows.stop)
            if low < high:
                place = piece.place + (end - high if piece.is_image else low - piece.start)
                yield piece, slice(low - rows.start, high - rows.start), slice(place, place + high - low)


def negated(spectrum: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        rest = spectrum.narrow(dim, 1, spectrum.shape[dim] - 1).flip(dim)
        spectrum = torch.cat([spectrum.narrow(dim, 0, 1), rest], dim)
    return spectrum


def _computers(length: int, owner: IntArray, size: int) -> IntArray:
    """Return which rank computes each row of the first half: where two own it and its mirror image, half of them each.

    What nobody owns has the owner ``size``, and so has a pair that nobody computes.
    """
    rows = np.arange(length // 2 + 1)
    pairs = np.stack([owner[rows], owner[(length - rows) % length]])
    computer = np.full_like(rows, size)
    changes = np.flatnonzero(np.any(np.diff(pairs, prepend=-1) != 0, axis=0))
    for run in np.split(rows, changes)[1:]:
        ranks = [rank for rank in pairs[:, run[0]] if rank < size]
        if ranks:
            computer[run] = np.repeat(ranks, split_sizes(len(run), len(ranks)))
    return computer


def _runs(rows: IntArray) -> tuple[Run, ...]:
    starts = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
    return tuple((int(run[0]), len(run)) for run in np.split(rows, starts)[1:])


def _pieces(owner: IntArray, place: IntArray, *, is_image: bool) -> Iterator[Piece]:
    """Yield the pieces of rows, or of their mirror images, of these owners and places."""
    step = -1 if is_image else 1
    starts = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(place, prepend=-1) != step))
    for part in np.split(np.arange(len(owner)), starts)[1:]:
        first, last = int(part[0]), int(part[-1])
        yield Piece(first, len(part), int(owner[first]), int(place[last if is_image else first]), is_image)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
