"""The frequencies of a sharded spectrum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distman.collectives import GroupLike, check_sizes, resolve_group
from distman.fft._arguments import as_length
from distman.topology import split_sizes


def fftfreq(
    n: int,
    d: float = 1.0,
    *,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Return this rank's part of the frequencies of a spectrum, of which :func:`torch.fft.fftfreq` gives all.

    Local.

    Args:
        n: Number of points of the full signal.
        d: Distance of the points; frequencies count the periods per unit of it.
        sizes: Lengths of all shards of the spectrum; None: :func:`distman.split_sizes`, as the transforms leave them.
        dtype: A floating point dtype; None: torch's default.
        device: Where the result is; None: torch's default.
        group: The group over which the spectrum is sharded: a process group, the name of one, or None for the world.

    Returns:
        A tensor of one dim, as long as this rank's shard.

    Raises:
        ValueError: The length, the distance, the sizes, the dtype or the group do not fit.

    Example on two ranks:
        >>> frequencies = fftfreq(6, 1 / 6)  # whole ones in a signal of length 1
        >>> all_gather_objects(frequencies.tolist())
        [[0.0, 1.0, 2.0], [-3.0, -2.0, -1.0]]
        >>> signal = torch.sin(2 * torch.pi * torch.arange(6) / 6).chunk(2)[rank]
        >>> slope = ifft(2j * torch.pi * frequencies * fft(signal)).real
        >>> all_gather_v(slope / torch.pi).round()
        tensor([ 2.,  1., -1., -2., -1.,  1.])
    """
    return _part(torch.fft.fftfreq, n, d, sizes, dtype, device, group)


def rfftfreq(
    n: int,
    d: float = 1.0,
    *,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Return this rank's part of the frequencies of half of a spectrum, of which :func:`torch.fft.rfftfreq` gives all.

    Local.

    Args:
        n: Number of points of the full signal.
        d: Distance of the points.
        sizes: Lengths of all shards of the half spectrum, ``n // 2 + 1`` together; None: :func:`distman.split_sizes`.
        dtype: A floating point dtype; None: torch's default.
        device: Where the result is; None: torch's default.
        group: A process group, the name of one, or None for the world.

    Returns:
        A tensor of one dim, as long as this rank's shard.

    Raises:
        ValueError: As of :func:`fftfreq`.

    Example on two ranks:
        >>> all_gather_objects(rfftfreq(6, 1 / 6).tolist())
        [[0.0, 1.0], [2.0, 3.0]]
    """
    return _part(torch.fft.rfftfreq, n, d, sizes, dtype, device, group)


def _part(
    function: Callable[..., torch.Tensor],
    n: int,
    d: float,
    sizes: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    group: GroupLike,
) -> torch.Tensor:
    members = resolve_group(group)
    if as_length(n) < 1 or d == 0:
        raise ValueError(
            f"n must be at least 1 and d other than 0, got {n} points at a distance of {d}. Pass those of the signal."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point one, got {dtype}. Pass torch.float32 or torch.float64.")
    full = function(n, d, dtype=dtype, device=device)
    lengths = split_sizes(len(full), members.size) if sizes is None else check_sizes(sizes, members)
    if sum(lengths) != len(full):
        raise ValueError(
            f"sizes must add up to the {len(full)} frequencies of {n} points, got {lengths}. Pass the lengths of the "
            "spectrum's shards."
        )
    return full.split(lengths)[members.rank].clone()
