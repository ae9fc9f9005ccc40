"""A transform of one dim of a sharded tensor, which is whole on each rank meanwhile."""

from __future__ import annotations

import dataclasses

import torch

from distman._groups.registry import Group
from distman.fft._blocks import ADJOINT, DUAL, LocalTransform, transform
from distman.fft._resharding import move
from distman.topology import split_sizes


@dataclasses.dataclass(frozen=True)
class LinePlan:
    local: LocalTransform
    shard: int
    sizes: tuple[int, ...]  # along the transformed dim, what they lack of the full length is zero
    out: int
    out_sizes: tuple[int, ...]  # along the transformed dim, what they lack of the full length is dropped
    way: int  # along which the tensor is sharded meanwhile if both shard and out are the transformed dim
    group: Group

    def adjoint(self) -> LinePlan:
        """Return the plan of the adjoint: the exponent's sign, the layouts and the padding are swapped."""
        is_half = self.local.kind in ("rfft", "irfft")
        local = dataclasses.replace(
            self.local,
            kind=ADJOINT[self.local.kind],
            norm=DUAL[self.local.norm],
            is_weighted=is_half and not self.local.is_weighted,
        )
        return dataclasses.replace(
            self, local=local, shard=self.out, sizes=self.out_sizes, out=self.shard, out_sizes=self.sizes
        )

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transform a shard, which is left as it is; nothing travels where shard and out are one other dim."""
        (dim,) = self.local.dims
        if self.shard != dim:
            if self.out == self.shard:
                return transform(tensor, self.local, keeps_input=True)
            return move(
                self.group, tensor, self.local, self.out, self.out_sizes, self.shard, self.sizes, sum(self.sizes)
            )
        way = self.way if self.out == dim else self.out
        length = tensor.shape[way]
        parts = split_sizes(length, self.group.size) if self.out == dim else self.out_sizes
        taken = self.local.length // 2 + 1 if self.local.kind == "irfft" else self.local.length
        tensor = transform(move(self.group, tensor, None, way, parts, dim, self.sizes, taken), self.local)
        return tensor if self.out == way else move(self.group, tensor, None, dim, self.out_sizes, way, parts, length)
