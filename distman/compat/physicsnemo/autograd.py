"""``physicsnemo.distributed.autograd``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distman import collectives
from distman.collectives import GroupLike, all_gather_v, indexed_all_to_all_v, scatter_v

__all__ = [
    "AllGatherVAutograd",
    "GatherVAutograd",
    "IndexedAllToAllVAutograd",
    "ScatterVAutograd",
    "all_gather_v",
    "gather_v",
    "indexed_all_to_all_v",
    "scatter_v",
]


def gather_v(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, dst: int = 0, group: GroupLike = None
) -> torch.Tensor:
    """Do what :func:`distman.collectives.gather_v` does; the other ranks get zeros in the shape of the full tensor.

    Collective. Blocking. Differentiable, also through the zeros.
    """
    full = collectives.gather_v(tensor, sizes, dim, dst, group)
    shape = list(full.shape)
    shape[dim] = sum(sizes) - shape[dim]
    return torch.cat([full, full.new_zeros(shape)], dim) if shape[dim] else full


class AllGatherVAutograd:
    """:func:`all_gather_v`, called as an autograd function."""

    apply = staticmethod(all_gather_v)


class GatherVAutograd:
    """:func:`gather_v`, called as an autograd function."""

    apply = staticmethod(gather_v)


class ScatterVAutograd:
    """:func:`scatter_v`, called as an autograd function."""

    apply = staticmethod(scatter_v)


class IndexedAllToAllVAutograd:
    """:func:`indexed_all_to_all_v`, called as an autograd function."""

    apply = staticmethod(indexed_all_to_all_v)
