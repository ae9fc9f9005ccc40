"""``physicsnemo.distributed.mappings``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distman import mappings
from distman.collectives import GroupLike
from distman.collectives._validation import check_call, normalize_dim, resolve_group
from distman.compat.physicsnemo.utils import compute_split_shapes
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region

__all__ = [
    "copy_to_parallel_region",
    "gather_from_parallel_region",
    "reduce_from_parallel_region",
    "scatter_to_parallel_region",
]


def scatter_to_parallel_region(input: torch.Tensor, dim: int, group: GroupLike) -> torch.Tensor:
    """Take this rank's slice of a replicated tensor, sized by ``compute_split_shapes``.

    Local; its backward pass is collective. Differentiable.
    """
    members = resolve_group(group)
    input = check_call("scatter_to_parallel_region", input, members, name="input", is_local=True, dim=dim)
    dim = normalize_dim(dim, input.ndim)
    sizes = compute_split_shapes(input.shape[dim], members.size)
    part: torch.Tensor = mappings._Scatter.apply(input, sizes, dim, members)
    return part


def gather_from_parallel_region(
    input: torch.Tensor, dim: int, shapes: Sequence[int] | None, group: GroupLike
) -> torch.Tensor:
    """Put the slices of the ranks of a region together.

    Collective. Blocking. Differentiable.
    """
    return mappings.gather_from_parallel_region(input, dim, shapes, group)
