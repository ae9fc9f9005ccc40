"""Fourier transforms of one dim of a sharded tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Unpack

import torch

from distman._job.groups.registry import Group
from distman.collectives import (
    AllToAll,
    GroupLike,
    admitted,
    check_call,
    layout_of,
    normalize_dim,
    resolve_group,
    shard_sizes,
    tell_apart,
)
from distman.fft._arguments import (
    as_length,
    check_norm,
    check_out_sizes,
    computable,
    cut_shards,
    fit,
    is_same_dim,
    signal_lengths,
)
from distman.fft._blocks import DUAL, Kind, LocalTransform
from distman.fft._plan import LinePlan
from distman.fft._resharding import execute
from distman.fft._signature import Layout, transform


@transform
def fft(
    tensor: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Transform one dim of a sharded tensor, as :func:`torch.fft.fft` does a full one.

    Example on two ranks:
        >>> signal = torch.cos(2 * torch.pi * torch.arange(6) / 6)
        >>> spectrum = fft(signal.chunk(2)[rank])
        >>> all_gather_v(spectrum).abs().round()
        tensor([0., 3., 0., 0., 0., 3.])
    """
    return _transform("fft", "fft", tensor, n, dim, norm, **layout)


@transform
def ifft(
    tensor: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Undo :func:`fft`, as :func:`torch.fft.ifft` does.

    Example on two ranks:
        >>> part = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[rank]
        >>> torch.allclose(ifft(fft(part)).real, part, atol=1e-6)
        True
    """
    return _transform("ifft", "ifft", tensor, n, dim, norm, **layout)


@transform
def rfft(
    tensor: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Transform real data along one dim to half of their spectrum, as :func:`torch.fft.rfft` does.

    Example on two ranks:
        >>> signal = torch.cos(2 * torch.pi * torch.arange(6) / 6)
        >>> all_gather_v(rfft(signal.chunk(2)[rank])).abs().round()
        tensor([0., 3., 0., 0.])
    """
    return _transform("rfft", "rfft", tensor, n, dim, norm, **layout)


@transform
def irfft(
    tensor: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Transform half of a spectrum along one dim to real data, as :func:`torch.fft.irfft` does: undoes :func:`rfft`.

    Example on two ranks:
        >>> part = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[rank]
        >>> torch.allclose(irfft(rfft(part)), part, atol=1e-6)
        True
    """
    return _transform("irfft", "irfft", tensor, n, dim, norm, **layout)


@transform
def hfft(
    tensor: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Transform half of a Hermitian signal along one dim to its real spectrum, as :func:`torch.fft.hfft` does.

    Example on two ranks:
        >>> half = torch.tensor([[1.0, 1.0], [0.0, 0.0]])[rank]  # of the signal 1, 1, 0, 0, 0, 1
        >>> all_gather_v(hfft(half)).round()
        tensor([ 3.,  2.,  0., -1.,  0.,  2.])
    """
    return _transform("irfft", "hfft", tensor, n, dim, norm, **layout)


@transform
def ihfft(
    tensor: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Undo :func:`hfft`: transform a real spectrum along one dim to half of its signal, as :func:`torch.fft.ihfft`.

    Example on two ranks:
        >>> spectrum = torch.tensor([3.0, 2.0, 0.0, -1.0, 0.0, 2.0]).chunk(2)[rank]
        >>> all_gather_v(ihfft(spectrum)).real.round()
        tensor([1., 1., 0., 0.])
    """
    return _transform("rfft", "ihfft", tensor, n, dim, norm, **layout)


def _transform(
    kind: Kind,
    name: str,
    tensor: torch.Tensor,
    n: int | None,
    dim: int,
    norm: str | None,
    *,
    shard_dim: int | None = None,
    out_dim: int | None = None,
    sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    members = resolve_group(group)
    stays = shard_dim is not None and (out_dim is None or is_same_dim(tensor, shard_dim, out_dim))
    is_local = stays and out_sizes is None and not is_same_dim(tensor, shard_dim, dim)
    tensor = admitted(name, tensor, members, has_header=sizes is None, is_local=is_local)
    tensor = computable(name, kind, tensor)
    dim = normalize_dim(dim, tensor.ndim)
    shard = dim if shard_dim is None else normalize_dim(shard_dim, tensor.ndim, "shard_dim")
    out = shard if out_dim is None else normalize_dim(out_dim, tensor.ndim, "out_dim")
    norm, wanted = check_norm(norm), as_length(n)
    if n is not None and wanted < 1:
        raise ValueError(f"n must be at least 1, got {n}. Pass the length of the signal.")
    tensor = check_call(
        name,
        tensor,
        members,
        free_dim=shard,
        unites_grad=sizes is None,
        dim=dim,
        n=wanted,
        norm=norm,
        shard_dim=shard,
        out_dim=out,
        sizes=sizes,
        out_sizes=out_sizes,
    )
    needs_no_sizes = shard == out != dim and out_sizes is None
    shards: list[int] = []
    if sizes is not None or not needs_no_sizes:
        tensor, shards, shard = shard_sizes(name, tensor, sizes, shard, members)
    full = dict(enumerate(tensor.shape)) | ({shard: sum(shards)} if shards else {})
    length = signal_lengths(kind, name, {dim: full[dim]}, (wanted,))[dim]
    full[dim] = length // 2 + 1 if kind == "rfft" else length
    results = shards if needs_no_sizes else check_out_sizes(out_sizes, out, full[out], members)
    tell_apart(f"{layout_of(tensor, shard)} along {dim} of {length}, {norm}, {shard} in {shards} to {out} in {results}")
    if name in ("hfft", "ihfft"):
        norm = DUAL[norm]
    local = LocalTransform(kind, (dim,), length, norm)
    result = _transform_shard(tensor.conj() if name == "hfft" else tensor, local, shard, shards, out, results, members)
    return result.conj_physical() if name == "ihfft" else result


def _transform_shard(
    tensor: torch.Tensor,
    local: LocalTransform,
    shard: int,
    shards: list[int],
    out: int,
    out_shards: list[int],
    group: Group,
) -> torch.Tensor:
    (dim,), length = local.dims, local.length
    if group.size == 1 and tensor.numel():  # torch fails on a batch of nothing
        whole: torch.Tensor = getattr(torch.fft, local.kind)(tensor, length, dim, local.norm)
        return whole
    taken = length // 2 + 1 if local.kind == "irfft" else length
    if shard != dim:
        tensor = fit(tensor, dim, taken)
        plan = LinePlan(local, shard, tuple(shards), out, tuple(out_shards), out, group)
        result = execute(tensor, plan)
        return _recut(result, out, shards, out_shards, group) if shard == out else result
    tensor, shards = cut_shards(tensor, dim, shards, taken, group.rank)
    others = [one for one in range(tensor.ndim) if one != dim]
    way = max(others, key=tensor.size) if others else tensor.ndim
    plan = LinePlan(local, dim, tuple(shards), out, tuple(out_shards), way, group)
    return execute(tensor, plan) if others else execute(tensor.unsqueeze(-1), plan).squeeze(-1)


def _recut(tensor: torch.Tensor, dim: int, sizes: list[int], out_sizes: list[int], group: Group) -> torch.Tensor:
    """Return a tensor in shards of other lengths."""
    if sizes == out_sizes:
        return tensor
    intervals, out_intervals = (
        list(itertools.pairwise(itertools.accumulate(one, initial=0))) for one in (sizes, out_sizes)
    )
    outgoing, incoming = (
        [max(0, min(end, mine[group.rank][1]) - max(start, mine[group.rank][0])) for start, end in theirs]
        for mine, theirs in ((intervals, out_intervals), (out_intervals, intervals))
    )
    result: torch.Tensor = AllToAll.apply(tensor, dim, outgoing, dim, incoming, group)
    return result
