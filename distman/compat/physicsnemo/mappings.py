"""``physicsnemo.distributed.mappings``."""

from __future__ import annotations

import torch

from distman.collectives import GroupLike
from distman.compat.physicsnemo.utils import compute_split_shapes
from distman.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_region,
)

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
    return scatter_region(input, dim, group, compute_split_shapes)
