"""Two dims transformed in the layout of model-parallel networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distman.fft._transforms import irfft2, rfft2

_SPATIAL = "spatial_parallel"


class DistributedRFFT2:
    """Half of the spectrum of real data in the layout of model-parallel networks, over the group "spatial_parallel"."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        s: Sequence[int | None] | None = None,
        dim: Sequence[int] = (-2, -1),
        norm: str | None = "ortho",
    ) -> torch.Tensor:
        """Transform data that is sharded along ``dim[1]``, and return the spectrum sharded along ``dim[0]``.

        Collective. Blocking. Differentiable, twice too. See :func:`rfft2` for arguments, cost and errors.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        return rfft2(x, s, dim, norm, shard_dim=dim[-1], out_dim=dim[0], group=_SPATIAL)


class DistributedIRFFT2:
    """The inverse of :class:`DistributedRFFT2`."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        s: Sequence[int | None] | None = None,
        dim: Sequence[int] = (-2, -1),
        norm: str | None = "ortho",
    ) -> torch.Tensor:
        """Transform a half spectrum that is sharded along ``dim[0]``, and return data sharded along ``dim[1]``.

        Collective. Blocking. Differentiable, twice too. See :func:`irfft2` for arguments, cost and errors.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        return irfft2(x, s, dim, norm, shard_dim=dim[0], out_dim=dim[-1], group=_SPATIAL)
