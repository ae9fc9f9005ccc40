"""What the transforms check in their arguments, and how they fit a tensor to them."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence

import torch

from distman._job.groups.registry import Group
from distman.collectives import check_sizes, normalize_dim
from distman.fft._blocks import Kind
from distman.topology import split_sizes

_NORMS = ("backward", "ortho", "forward")


def computable(name: str, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
    if kind == "rfft" and tensor.is_complex():
        raise ValueError(
            f"the tensor of {name} must be real, got {tensor.dtype}. Use {re.sub('[rh]', '', name, count=1)}."
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
    if tensor.dtype in (torch.float16, torch.bfloat16):
        if not torch.is_autocast_enabled(tensor.device.type):
            raise ValueError(
                f"the tensor of {name} must be of 32 or 64 bits, got {tensor.dtype}. Convert it with .float()."
            )
        tensor = tensor.float()
    return tensor if kind == "rfft" or tensor.is_complex() else tensor.to(tensor.dtype.to_complex())


def as_lengths(s: Sequence[int | None]) -> tuple[int, ...]:
    """Return lengths, with -1 for None: the length that is there."""
    try:
        return tuple(-1 if length is None else operator.index(length) for length in s)
    except TypeError:
        raise ValueError(f"s must be a sequence of integers, got {s!r}. Pass one for each dim.") from None


def as_length(n: int | None) -> int:
    """Return a length, with -1 for None: the length that is there."""
    try:
        length = -1 if n is None else operator.index(n)
    except TypeError:
        raise ValueError(f"n must be an integer, got {n!r}. Pass the length of the signal.") from None
    if n is not None and length < 1:
        raise ValueError(f"n must be at least 1, got {n}. Pass the length of the signal.")
    return length


def check_dims(dim: Sequence[int] | None, s: tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    if dim is None:
        dim = range(ndim) if s is None else range(-len(s), 0)
    try:
        dims = tuple(normalize_dim(operator.index(one), ndim) for one in dim)
    except TypeError:
        raise ValueError(f"dim must be a sequence of integers, got {dim!r}. Pass one or more dims.") from None
    if len(set(dims)) != len(dims) or len(dims) < 2:
        raise ValueError(
            f"dim must hold at least two different dims, got {tuple(dim)} for a tensor of {ndim} dims. Functions like "
            "fft and rfft transform a single one."
        )
    if s is not None and len(s) != len(dims):
        raise ValueError(f"s must hold one length for each of {len(dims)} dims, got {s}. Pass as many lengths as dims.")
    return dims


def is_same_dim(tensor: torch.Tensor, one: int | None, other: int | None) -> bool:
    """Return whether two numbers name one dim of a tensor, which need not be one that can be transformed."""
    if not (isinstance(one, int) and isinstance(other, int) and isinstance(tensor, torch.Tensor) and tensor.dim()):
        return one == other
    return one % tensor.dim() == other % tensor.dim()


def check_among(name: str, dim: int, dims: tuple[int, ...], ndim: int) -> int:
    chosen = normalize_dim(dim, ndim, name)
    if chosen not in dims:
        raise ValueError(
            f"{name} must be one of the transformed dims {dims}, got {dim}. Where no transformed dim is sharded, each "
            "rank can use torch.fft."
        )
    return chosen


def check_norm(norm: str | None) -> str:
    norm = "backward" if norm is None else norm
    if norm not in _NORMS:
        raise ValueError(f"norm must be one of {', '.join(_NORMS)}, or None, got {norm!r}. Choose one of these.")
    return norm


def check_out_sizes(out_sizes: Sequence[int] | None, dim: int, length: int, group: Group) -> list[int]:
    """Return the lengths of the result's shards along a dim where all of it is that long."""
    sizes = split_sizes(length, group.size) if out_sizes is None else check_sizes(out_sizes, group, "out_sizes")
    if sum(sizes) != length:
        raise ValueError(
            f"out_sizes must add up to the length {length} of the result along dim {dim}, got {sizes}. "
            "Pass the lengths of the shards of the result."
        )
    return sizes


def signal_lengths(kind: Kind, name: str, full: dict[int, int], s: tuple[int, ...] | None) -> dict[int, int]:
    """Return the length of the signal along each transformed dim, from the tensor's lengths and those asked for."""
    *_, last = full_dims = tuple(full)
    lengths = dict(full)
    if kind == "irfft":
        lengths[last] = 2 * (lengths[last] - 1)
    if s is not None:
        lengths |= {one: length for one, length in zip(full_dims, s, strict=True) if length != -1}
    if min(lengths.values()) < 1:
        raise ValueError(
            f"the signal of {name} must have at least one point along each of its dims, got {list(lengths.values())}. "
            "Pass lengths of 1 or more, or None for the length that is there."
        )
    return lengths


def cut_shards(
    tensor: torch.Tensor, dim: int, sizes: list[int], length: int, rank: int
) -> tuple[torch.Tensor, list[int]]:
    """Cut the shards off behind a full length; what they lack of it is filled up on the way."""
    ends = [min(end, length) for end in itertools.accumulate(sizes)]
    kept = [end - start for start, end in itertools.pairwise([0, *ends])]
    return tensor if kept[rank] == sizes[rank] else tensor.narrow(dim, 0, kept[rank]), kept


def fit(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    if missing < 0:
        return tensor.narrow(dim, 0, length)
    filling = tensor.new_zeros([missing if one == dim else size for one, size in enumerate(tensor.shape)])
    return torch.cat([tensor, filling], dim)
