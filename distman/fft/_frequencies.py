"""The frequencies of a sharded spectrum, and its shift to the middle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distman._coordination.wait_scope import collective
from distman.collectives import GroupLike, admitted, check_call, check_sizes, normalize_dim, resolve_group, shard_sizes
from distman.fft._arguments import as_dims, as_length, is_same_dim
from distman.fft._rearrangement import rolled
from distman.fft._resharding import execute
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
    n = as_length(n)
    start, end, step = _part(n, d, n, sizes, group)
    dtype, middle = _floating(dtype), (n + 1) // 2
    rising = torch.arange(start, max(start, min(end, middle)), dtype=dtype, device=device)
    negative = torch.arange(max(start, middle) - n, max(start, end, middle) - n, dtype=dtype, device=device)
    return torch.cat([rising, negative]).mul_(step)


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
    n = as_length(n)
    start, end, step = _part(n, d, n // 2 + 1, sizes, group)
    return torch.arange(start, end, dtype=_floating(dtype), device=device).mul_(step)


def _part(n: int, d: float, length: int, sizes: Sequence[int] | None, group: GroupLike) -> tuple[int, int, float]:
    """Return where this rank's frequencies start and end, and how far they are from each other."""
    members = resolve_group(group)
    if n < 1 or d == 0:
        raise ValueError(
            f"n must be at least 1 and d other than 0, got {n} points at a distance of {d}. Pass those of the signal."
        )
    lengths = split_sizes(length, members.size) if sizes is None else check_sizes(sizes, members)
    if sum(lengths) != length:
        raise ValueError(
            f"sizes must add up to the {length} frequencies of {n} points, got {lengths}. Pass the lengths of the "
            "spectrum's shards."
        )
    start = sum(lengths[: members.rank])
    return start, start + lengths[members.rank], 1.0 / (n * d)


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point one, got {dtype}. Pass torch.float32 or torch.float64.")
    return dtype


@collective
def fftshift(
    tensor: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    shard_dim: int | None = None,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Shift the frequency zero of a sharded spectrum to the middle, as :func:`torch.fft.fftshift` does with a full one.

    Collective, if the sharded dim is shifted. Blocking. Differentiable, twice too.

    Args:
        tensor: This rank's shard, of any dtype, shape ``(*, m, *)`` with m at ``shard_dim``; m may differ between ranks
            and be 0.
        dim: The dim or the dims to shift; None: all.
        shard_dim: The dim along which the tensor is sharded, one of those or another; None, if a single dim is shifted:
            that one.
        sizes: Lengths of all shards, the same list on all ranks; None lets the ranks exchange them.
        group: A process group, the name of one, or None for the world.

    Returns:
        A new tensor of the same shape, sharded alike.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Dims, sizes, dtype or group do not fit, or several dims are shifted without ``shard_dim``; without
            ``sizes`` on every rank: the shards differ in dtype or in another dim.
        PlanMismatchError: On every rank that waits: another one was given what messages cannot carry. In debug mode on
            all: the ranks call differently.

    Example on two ranks:
        >>> all_gather_objects(fftshift(fftfreq(6, 1 / 6)).tolist())
        [[-3.0, -2.0, -1.0], [0.0, 1.0, 2.0]]
    """
    return _shift("fftshift", tensor, dim, shard_dim, sizes, group)


@collective
def ifftshift(
    tensor: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    shard_dim: int | None = None,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Undo :func:`fftshift`, as :func:`torch.fft.ifftshift` does.

    Collective, if the sharded dim is shifted. Blocking. Differentiable, twice too.

    Args:
        tensor: This rank's shard, as of :func:`fftshift`.
        dim: The dim or the dims to shift; None: all.
        shard_dim: The dim along which the tensor is sharded; None, if a single dim is shifted: that one.
        sizes: Lengths of all shards; None lets the ranks exchange them.
        group: A process group, the name of one, or None for the world.

    Returns:
        A new tensor of the same shape.

    Raises:
        Exception: As of :func:`fftshift`.

    Example on two ranks:
        >>> part = torch.arange(5).split([3, 2])[rank]  # an odd number of points: fftshift twice would not undo it
        >>> all_gather_objects(ifftshift(fftshift(part)).tolist())
        [[0, 1, 2], [3, 4]]
    """
    return _shift("ifftshift", tensor, dim, shard_dim, sizes, group)


def _shift(
    name: str,
    tensor: torch.Tensor,
    dim: int | Sequence[int] | None,
    shard_dim: int | None,
    sizes: Sequence[int] | None,
    group: GroupLike,
) -> torch.Tensor:
    members = resolve_group(group)
    tensor = admitted(name, tensor, members, has_header=sizes is None, is_local=not _is_moved(tensor, dim, shard_dim))
    dim = tuple(range(tensor.ndim)) if dim is None else dim
    dims = as_dims(dim if isinstance(dim, Sequence) else (dim,), tensor.ndim)
    if not dims or len(set(dims)) != len(dims):
        raise ValueError(
            f"dim must hold one or more different dims, got {dim!r} for a tensor of {tensor.ndim} dims. "
            "Name each dim once; a scalar has none to shift."
        )
    if shard_dim is None and len(dims) > 1:
        raise ValueError(f"shard_dim must be given where several dims are shifted, got {dims}. Pass the sharded one.")
    shard = dims[0] if shard_dim is None else normalize_dim(shard_dim, tensor.ndim, "shard_dim")
    tensor = check_call(
        name, tensor, members, free_dim=shard, unites_grad=sizes is None, dims=dims, shard_dim=shard, sizes=sizes
    )
    local = dims
    if members.size > 1 and shard in dims:
        local = tuple(one for one in dims if one != shard)
        tensor, shards, shard = shard_sizes(name, tensor, sizes, shard, members)
        middle = sum(shards) // 2
        shift = middle if name == "fftshift" else sum(shards) - middle
        tensor = execute(tensor, rolled(shard, tuple(shards), shift, members))
    shifted: torch.Tensor = getattr(torch.fft, name)(tensor, local) if local else tensor
    return shifted


def _is_moved(tensor: torch.Tensor, dim: int | Sequence[int] | None, shard_dim: int | None) -> bool:
    if dim is None or shard_dim is None:
        return True
    return any(is_same_dim(tensor, shard_dim, one) for one in (dim if isinstance(dim, Sequence) else (dim,)))
