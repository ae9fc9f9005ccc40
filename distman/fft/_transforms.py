"""Fourier transforms of one dim of a sharded tensor, and of several, of which one is that of the shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from distman.fft._call import transform_shard
from distman.fft._signature import Dims, Layout, Length, Lengths, Norm, transform

_SPATIAL = "spatial_parallel"


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


@transform
def fftn(tensor: Tensor, s: Lengths = None, dim: Dims = None, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform a tensor that is sharded along one of the transformed dims, as :func:`torch.fft.fftn` does a full one.

    Example on two ranks:
        >>> rows = torch.ones(2, 6)  # of a field of four rows
        >>> columns = fftn(rows)
        >>> tuple(columns.shape)
        (4, 3)
        >>> tuple(fftn(rows, out_dim=0).shape)
        (2, 6)
    """
    return transform_shard("fftn", tensor, s, dim, norm, **layout)


@transform
def ifftn(tensor: Tensor, s: Lengths = None, dim: Dims = None, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Undo :func:`fftn`, as :func:`torch.fft.ifftn` does.

    Example on two ranks:
        >>> rows = torch.arange(12.0).reshape(2, 6) + 12 * rank  # of a field of four rows
        >>> torch.allclose(ifftn(fftn(rows)).real, rows, atol=1e-5)
        True
    """
    return transform_shard("ifftn", tensor, s, dim, norm, **layout)


@transform
def rfftn(tensor: Tensor, s: Lengths = None, dim: Dims = None, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform real data to half of its spectrum, as :func:`torch.fft.rfftn` does: the last of the dims is halved.

    Example on two ranks:
        >>> rows = torch.ones(2, 6)  # of a field of four rows
        >>> tuple(rfftn(rows).shape)  # half of the spectrum is four columns wide
        (4, 2)
    """
    return transform_shard("rfftn", tensor, s, dim, norm, **layout)


@transform
def irfftn(tensor: Tensor, s: Lengths = None, dim: Dims = None, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform half of a spectrum to real data, as :func:`torch.fft.irfftn` does: the inverse of :func:`rfftn`.

    Example on two ranks:
        >>> rows = torch.rand(2, 5)  # of a field of four rows and five columns
        >>> torch.allclose(irfftn(rfftn(rows), s=(4, 5)), rows, atol=1e-6)
        True
    """
    return transform_shard("irfftn", tensor, s, dim, norm, **layout)


@transform
def fft2(
    tensor: Tensor, s: Lengths = None, dim: Dims = (-2, -1), norm: Norm = None, **layout: Unpack[Layout]
) -> Tensor:
    """Transform two dims: :func:`fftn` with another default of ``dim``.

    Example on two ranks:
        >>> halves = torch.ones(8, 2, 6)  # of eight images of 4 x 6
        >>> tuple(fft2(halves).shape)
        (8, 4, 3)
    """
    return transform_shard("fft2", tensor, s, dim, norm, **layout)


@transform
def ifft2(
    tensor: Tensor, s: Lengths = None, dim: Dims = (-2, -1), norm: Norm = None, **layout: Unpack[Layout]
) -> Tensor:
    """Undo :func:`fft2`: :func:`ifftn` with another default of ``dim``.

    Example on two ranks:
        >>> halves = torch.rand(8, 2, 6)  # of eight images of 4 x 6
        >>> torch.allclose(ifft2(fft2(halves)).real, halves, atol=1e-6)
        True
    """
    return transform_shard("ifft2", tensor, s, dim, norm, **layout)


@transform
def rfft2(
    tensor: Tensor, s: Lengths = None, dim: Dims = (-2, -1), norm: Norm = None, **layout: Unpack[Layout]
) -> Tensor:
    """Transform two dims of real data to half of their spectrum: :func:`rfftn` with another default of ``dim``.

    Example on two ranks:
        >>> halves = torch.ones(8, 2, 6)  # of eight images of 4 x 6
        >>> tuple(rfft2(halves).shape)
        (8, 4, 2)
    """
    return transform_shard("rfft2", tensor, s, dim, norm, **layout)


@transform
def irfft2(
    tensor: Tensor, s: Lengths = None, dim: Dims = (-2, -1), norm: Norm = None, **layout: Unpack[Layout]
) -> Tensor:
    """Undo :func:`rfft2`: :func:`irfftn` with another default of ``dim``.

    Example on two ranks:
        >>> halves = torch.rand(8, 2, 6)  # of eight images of 4 x 6
        >>> torch.allclose(irfft2(rfft2(halves)), halves, atol=1e-6)
        True
    """
    return transform_shard("irfft2", tensor, s, dim, norm, **layout)


# The layout of model-parallel networks.


class DistributedRFFT2:
    """Half of the spectrum of real data in the layout of model-parallel networks, over the group "spatial_parallel".

    Example on two ranks:
        >>> manager.create_process_subgroup("spatial_parallel", 2)
        >>> columns = torch.ones(4, 3)  # of a field of 4 x 6
        >>> tuple(DistributedRFFT2.apply(columns).shape)  # rows of half of the spectrum
        (2, 4)
    """

    @staticmethod
    def apply(
        x: torch.Tensor,
        s: Sequence[int | None] | None = None,
        dim: Sequence[int] = (-2, -1),
        norm: str | None = "ortho",
    ) -> torch.Tensor:
        """Transform data that is sharded along ``dim[1]``, and return the spectrum sharded along ``dim[0]``.

        Collective. Blocking. Differentiable, twice too.

        Args:
            x: This rank's shard, real.
            s: Lengths of the full signal along ``dim``; None keeps them.
            dim: The two transformed dims, the rows' first.
            norm: As of :func:`rfft2`.

        Returns:
            This rank's shard of half of the spectrum, complex.

        Raises:
            UndefinedGroupError: There is no group of that name.
            Exception: As of :func:`rfft2`.

        Example on two ranks:
            >>> manager.create_process_subgroup("spatial_parallel", 2)
            >>> images = torch.ones(8, 4, 3)  # the left or right half of eight images of 4 x 6
            >>> tuple(DistributedRFFT2.apply(images).shape)
            (8, 2, 4)
        """
        return rfft2(x, s, dim, norm, shard_dim=dim[-1], out_dim=dim[0], group=_SPATIAL)


class DistributedIRFFT2:
    """The inverse of :class:`DistributedRFFT2`.

    Example on two ranks:
        >>> manager.create_process_subgroup("spatial_parallel", 2)
        >>> columns = torch.rand(4, 3)  # of a field of 4 x 6
        >>> torch.allclose(DistributedIRFFT2.apply(DistributedRFFT2.apply(columns)), columns, atol=1e-6)
        True
    """

    @staticmethod
    def apply(
        x: torch.Tensor,
        s: Sequence[int | None] | None = None,
        dim: Sequence[int] = (-2, -1),
        norm: str | None = "ortho",
    ) -> torch.Tensor:
        """Transform a half spectrum that is sharded along ``dim[0]``, and return data sharded along ``dim[1]``.

        Collective. Blocking. Differentiable, twice too.

        Args:
            x: This rank's shard of half of a spectrum.
            s: Lengths of the full real signal along ``dim``; None: as of :func:`irfft2`.
            dim: The two transformed dims, the rows' first.
            norm: As of :func:`irfft2`.

        Returns:
            This rank's shard of the signal, real.

        Raises:
            UndefinedGroupError: There is no group of that name.
            Exception: As of :func:`irfft2`.

        Example on two ranks:
            >>> manager.create_process_subgroup("spatial_parallel", 2)
            >>> spectra = torch.ones(8, 2, 4, dtype=torch.complex64)
            >>> tuple(DistributedIRFFT2.apply(spectra).shape)
            (8, 4, 3)
        """
        return irfft2(x, s, dim, norm, shard_dim=dim[0], out_dim=dim[-1], group=_SPATIAL)
