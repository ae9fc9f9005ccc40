"""Two dims transformed in the layout of model-parallel networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distman.fft._transforms import irfft2, rfft2

_SPATIAL = "spatial_parallel"


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
