"""``physicsnemo.distributed.autograd``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def _as_class(function: Callable[..., torch.Tensor]) -> Any:
    """Return a class whose ``apply`` is a function, as of an autograd function."""
    return type(function.__name__, (), {"__doc__": function.__doc__, "apply": staticmethod(function)})


AllGatherVAutograd = _as_class(all_gather_v)
GatherVAutograd = _as_class(gather_v)
ScatterVAutograd = _as_class(scatter_v)
IndexedAllToAllVAutograd = _as_class(indexed_all_to_all_v)
