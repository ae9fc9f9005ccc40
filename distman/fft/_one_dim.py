"""Fourier transforms of one dim of a sharded tensor."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from distman.fft._call import transform_shard
from distman.fft._signature import Layout, Length, Norm, transform


@transform
def fft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform one dim of a sharded tensor, as :func:`torch.fft.fft` does a full one.

    Example on two ranks:
        >>> signal = torch.cos(2 * torch.pi * torch.arange(6) / 6)
        >>> spectrum = fft(signal.chunk(2)[rank])
        >>> all_gather_v(spectrum).abs().round()
        tensor([0., 3., 0., 0., 0., 3.])
    """
    return transform_shard("fft", tensor, n, dim, norm, **layout)


@transform
def ifft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Undo :func:`fft`, as :func:`torch.fft.ifft` does.

    Example on two ranks:
        >>> part = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[rank]
        >>> torch.allclose(ifft(fft(part)).real, part, atol=1e-6)
        True
    """
    return transform_shard("ifft", tensor, n, dim, norm, **layout)


@transform
def rfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform real data along one dim to half of their spectrum, as :func:`torch.fft.rfft` does.

    Example on two ranks:
        >>> signal = torch.cos(2 * torch.pi * torch.arange(6) / 6)
        >>> all_gather_v(rfft(signal.chunk(2)[rank])).abs().round()
        tensor([0., 3., 0., 0.])
    """
    return transform_shard("rfft", tensor, n, dim, norm, **layout)


@transform
def irfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform half of a spectrum along one dim to real data, as :func:`torch.fft.irfft` does: undoes :func:`rfft`.

    Example on two ranks:
        >>> part = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[rank]
        >>> torch.allclose(irfft(rfft(part)), part, atol=1e-6)
        True
    """
    return transform_shard("irfft", tensor, n, dim, norm, **layout)


@transform
def hfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform half of a Hermitian signal along one dim to its real spectrum, as :func:`torch.fft.hfft` does.

    Example on two ranks:
        >>> half = torch.tensor([[1.0, 1.0], [0.0, 0.0]])[rank]  # of the signal 1, 1, 0, 0, 0, 1
        >>> all_gather_v(hfft(half)).round()
        tensor([ 3.,  2.,  0., -1.,  0.,  2.])
    """
    return transform_shard("hfft", tensor, n, dim, norm, **layout)


@transform
def ihfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Undo :func:`hfft`: transform a real spectrum along one dim to half of its signal, as :func:`torch.fft.ihfft`.

    Example on two ranks:
        >>> spectrum = torch.tensor([3.0, 2.0, 0.0, -1.0, 0.0, 2.0]).chunk(2)[rank]
        >>> all_gather_v(ihfft(spectrum)).real.round()
        tensor([1., 1., 0., 0.])
    """
    return transform_shard("ihfft", tensor, n, dim, norm, **layout)
