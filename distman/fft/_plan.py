"""One transform of a sharded tensor: in which order its dims are transformed, and what travels between the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from distman._job.groups.registry import Group
from distman.fft._blocks import (
    ADJOINT,
    DUAL,
    Index,
    Kind,
    LocalTransform,
    blocks_of,
    indices_of_blocks,
    scale_pairs,
    transform,
)
from distman.fft._hermitian import Half, HermitianRows, negated
from distman.fft._resharding import exchange_blocks, move, runs_of
from distman.topology import split_sizes


@dataclasses.dataclass(frozen=True)
class Plan:
    """One transform over a group.

    Every dim but that of the shards has its full length in the input. The whole dims are transformed first; then the
    ranks exchange their parts, so that the dim of the shards is whole and another one, ``way``, is split; then that dim
    is transformed. Where several are, ``shard`` and ``out`` are among them. Of half a spectrum all frequencies but the
    first, and of an even length the last, stand for two: an inverse counts them twice, so the adjoint of an ``rfft`` is
    an ``irfft`` that halves them first, and the other way round. Such a plan is weighted.
    """

    kind: Kind  # rfft gives half of a spectrum along dims[-1], irfft takes one
    dims: tuple[int, ...]
    lengths: dict[int, int]  # of the full signal, along each of dims
    shard: int
    sizes: tuple[int, ...]  # of the input's shards; what they lack of the full length is zero
    out: int
    out_sizes: tuple[int, ...]  # of the result's shards; what they lack of the full length is dropped
    norm: str
    group: Group
    is_weighted: bool = False

    def adjoint(self) -> Plan:
        return dataclasses.replace(
            self,
            kind=ADJOINT[self.kind],
            shard=self.out,
            sizes=self.out_sizes,
            out=self.shard,
            out_sizes=self.sizes,
            norm=DUAL[self.norm],
            is_weighted=self.kind in ("rfft", "irfft") and not self.is_weighted,
        )

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transform a shard, which is left as it is."""
        last = self.dims[-1]
        if len(self.dims) == 1:
            return self._line(tensor)
        if self.kind == "rfft":
            is_mirrored = self.shard == last and self.out != last
            return self._to_half_mirrored(tensor) if is_mirrored else self._to_half(tensor)
        if self.kind == "irfft":
            is_mirrored = self.shard != last and self.out == last
            return self._to_real_mirrored(tensor) if is_mirrored else self._to_real(tensor)
        return self._complex(tensor)

    @property
    def _half(self) -> int:
        return self.lengths[self.dims[-1]] // 2 + 1

    def _others(self, *taken: int) -> tuple[int, ...]:
        return tuple(dim for dim in self.dims if dim not in taken)

    def _local(self, kind: Kind, *dims: int) -> LocalTransform:
        is_weighted = self.is_weighted and dims[-1] == self.dims[-1]
        return LocalTransform(kind, dims, self.lengths[dims[-1]], self.norm, is_weighted)

    def _parts(self, dim: int, length: int) -> tuple[int, ...]:
        """Return the lengths of the shards along a dim, on the way or at its end."""
        return self.out_sizes if dim == self.out else tuple(split_sizes(length, self.group.size))

    def _line(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transform one dim; nothing travels where the tensor is sharded along another one, and stays so."""
        (dim,), shard, out = self.dims, self.shard, self.out
        local = self._local(self.kind, dim)
        if shard == out != dim:
            return transform(tensor, local, keeps_input=True)
        if shard != dim:
            return move(self.group, tensor, local, out, self.out_sizes, shard, self.sizes, sum(self.sizes))
        way = out if out != dim else max((one for one in range(tensor.ndim) if one != dim), key=tensor.size)
        joined = self._half if self.kind == "irfft" else self.lengths[dim]
        return self._pass(tensor, None, local, way, tensor.shape[way], joined)

    def _complex(self, tensor: torch.Tensor) -> torch.Tensor:
        shard = self.shard
        way = self.out if self.out != shard else self._others(shard)[-1]
        first = self._local(self.kind, *self._others(shard))
        second = self._local(self.kind, shard)
        return self._pass(tensor, first, second, way, self.lengths[way], self.lengths[shard])

    def _to_half(self, tensor: torch.Tensor) -> torch.Tensor:
        shard, last = self.shard, self.dims[-1]
        if shard != last:
            way = self.out if self.out != shard else last
            length = self._half if way == last else self.lengths[way]
            first = self._local("rfft", *self._others(shard, last), last)
            return self._pass(tensor, first, self._local("fft", shard), way, length, self.lengths[shard])
        way, *others = self._others(last)
        half = self._local("rfft", *others, last)
        return self._pass(tensor, None, half, way, self.lengths[way], self.lengths[last], self._local("fft", way))

    def _to_real(self, tensor: torch.Tensor) -> torch.Tensor:
        shard, out, last = self.shard, self.out, self.dims[-1]
        others = self._others(shard, last)
        first = self._local("ifft", *others) if others else None
        real = self._local("irfft", last)
        if shard == last:
            way = out if out != last else others[0]
            return self._pass(tensor, first, real, way, self.lengths[way], self._half)
        if out != shard:
            real = self._local("irfft", shard, last)
            return self._pass(tensor, first, real, out, self.lengths[out], self.lengths[shard])
        return self._pass(tensor, first, self._local("ifft", shard), last, self._half, self.lengths[shard], real)

    def _pass(
        self,
        tensor: torch.Tensor,
        first: LocalTransform | None,
        second: LocalTransform,
        way: int,
        length: int,
        joined: int,
        third: LocalTransform | None = None,
    ) -> torch.Tensor:
        """Transform the whole dims, exchange, transform the dim of the shards, and go back if that is asked for.

        A third transform is done at the end, of the dim that is split on the way.
        """
        parts = self._parts(way, length)
        tensor = move(self.group, tensor, first, way, parts, self.shard, self.sizes, joined)
        back = self.shard, self.out_sizes, way, parts, length
        if third is not None:
            return transform(move(self.group, tensor, second, *back), third)
        tensor = transform(tensor, second)
        return tensor if self.out == way else move(self.group, tensor, None, *back)

    def _to_half_mirrored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transform real data that is sharded along the last dim to half of its spectrum, sharded along another."""
        last, way, rank = self.dims[-1], self.out, self.group.rank
        others = self._others(last, way)
        rows = HermitianRows.of(self.lengths[way], self.out_sizes, rank)
        first = self._local("rfft", *others, way)
        like = tensor.new_empty(0, dtype=first.dtype(tensor.dtype))
        tensor = exchange_blocks(
            self.group,
            blocks_of(tensor, first, across=last),
            like,
            first.shape(tensor.shape),
            way,
            rows.runs,
            last,
            self.sizes,
            self.lengths[last],
        )
        shape = [*tensor.shape[:way], *tensor.shape[way + 1 :]]
        shape[last - (way < last)] = self._half
        return rows.to_owners(self._halves(tensor), like, shape, self.group).movedim(0, way)

    def _halves(self, tensor: torch.Tensor) -> Iterator[Half]:
        """Yield the rows that this rank computes, transformed along the last dim, and their images, block by block."""
        last, way = self.dims[-1], self.out
        others = self._others(last, way)
        for index, block in blocks_of(tensor, self._along_last("fft"), whole=others):
            direct = block.narrow(last, 0, self._half)
            mirrored = negated(block, others)
            first = mirrored.narrow(last, 0, 1).flip(way)
            rest = mirrored.narrow(last, self.lengths[last] - self._half + 1, self._half - 1).flip(way, last)
            images = torch.cat([first, rest], last)
            if self.is_weighted:
                scale_pairs(direct, last, self.lengths[last], 2.0)
                scale_pairs(images, last, self.lengths[last], 2.0)
            yield (index[way], *index[:way], *index[way + 1 :]), direct.movedim(way, 0), images.movedim(way, 0)

    def _to_real_mirrored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transform half of a spectrum that is sharded along another dim to real data sharded along the last."""
        last, way, rank = self.dims[-1], self.shard, self.group.rank
        rows = HermitianRows.of(self.lengths[way], self.sizes, rank)
        held = rows.to_computers(tensor.movedim(way, 0), self.group)
        shape = list(tensor.shape)
        shape[way], shape[last] = rows.num_computed[rank], self.lengths[last]
        tensor = exchange_blocks(
            self.group,
            self._full_rows(held, rows, tensor.new_empty(1).expand(shape)),
            tensor,
            shape,
            last,
            runs_of(self.out_sizes),
            way,
            rows.num_computed,
            self.lengths[way] // 2 + 1,
        )
        local = self._local("irfft", *self._others(last, way), way)
        return transform(tensor, local, runs=rows.runs_in_order)

    def _full_rows(
        self, held: Sequence[torch.Tensor], rows: HermitianRows, like: torch.Tensor
    ) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield the rows that this rank computes, made whole and transformed along the last dim, block by block."""
        last, way = self.dims[-1], self.shard
        others = self._others(last, way)
        length, middle = self.lengths[last], (self.lengths[last] - 1) // 2
        local = self._along_last("ifft")
        for index in indices_of_blocks(like, [last, *others], way):
            halves = rows.halves(held, (index[way], *index[:way], *index[way + 1 :]))
            direct, images = (half.movedim(0, way) for half in halves)
            images = negated(images, others)
            alone = [0, length // 2] if length % 2 == 0 else [0]  # frequencies that are their own negatives
            means = [(direct.narrow(last, one, 1) + images.narrow(last, one, 1).flip(way).conj()) / 2 for one in alone]
            rising = direct.narrow(last, 1, middle)
            falling = images.narrow(last, 1, middle).flip(way, last).conj_physical_()
            parts = [means[0], rising, *means[1:], falling]
            full = torch.cat([part.movedim(last, -1) for part in parts], -1)
            if self.is_weighted:
                scale_pairs(full, -1, length, 0.5)
                full.narrow(-1, length - middle, middle).mul_(0.5)
            yield index, local(full).movedim(-1, last)

    def _along_last(self, kind: Kind) -> LocalTransform:
        """Return a transform from complex to complex data along the last dim; weights are no part of it."""
        return LocalTransform(kind, self.dims[-1:], self.lengths[self.dims[-1]], self.norm)
