"""Fourier transforms of a tensor that is sharded over ranks, along one of the transformed dims."""

from __future__ import annotations

from distman.fft._model_parallel import DistributedIRFFT2, DistributedRFFT2
from distman.fft._transforms import (
    fft2,
    fftn,
    ifft2,
    ifftn,
    irfft2,
    irfftn,
    rfft2,
    rfftn,
)

__all__ = [
    "DistributedIRFFT2",
    "DistributedRFFT2",
    "fft2",
    "fftn",
    "ifft2",
    "ifftn",
    "irfft2",
    "irfftn",
    "rfft2",
    "rfftn",
]
