"""``physicsnemo.distributed.fft``."""

from __future__ import annotations

import torch

from distman.compat.physicsnemo.mappings import gather_from_parallel_region, scatter_to_parallel_region
from distman.compat.physicsnemo.utils import pad_helper
from distman.fft import DistributedIRFFT2, DistributedRFFT2

__all__ = ["DistributedIRFFT2", "DistributedRFFT2", "conj_pad_helper_2d"]


def conj_pad_helper_2d(tensor: torch.Tensor, pad_dim: int, other_dim: int, new_size: int) -> torch.Tensor:
    """Return the whole spectrum of a real signal from its half, sharded over the group "spatial_parallel".

    Collective. Blocking. Differentiable.
    """
    half = tensor.shape[pad_dim]
    padded = pad_helper(tensor, pad_dim, new_size, mode="conj")
    whole = gather_from_parallel_region(padded, other_dim, None, "spatial_parallel")
    known, added = whole.split([half, new_size - half], pad_dim)
    added = added.roll(-1, other_dim).flip(other_dim)  # the frequency 0 stays, the others change their sign
    return scatter_to_parallel_region(torch.cat([known, added], pad_dim), other_dim, "spatial_parallel")
