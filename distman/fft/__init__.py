"""Fourier transforms of a tensor that is sharded over ranks, along a transformed dim or another one."""

from __future__ import annotations

from distman.fft._afno import DistributedAFNO
from distman.fft._transforms import (
    DistributedIRFFT2,
    DistributedRFFT2,
    fft,
    fft2,
    fftn,
    hfft,
    ifft,
    ifft2,
    ifftn,
    ihfft,
    irfft,
    irfft2,
    irfftn,
    rfft,
    rfft2,
    rfftn,
)

__all__ = [
    "DistributedAFNO",
    "DistributedIRFFT2",
    "DistributedRFFT2",
    "fft",
    "fft2",
    "fftn",
    "hfft",
    "ifft",
    "ifft2",
    "ifftn",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
]
