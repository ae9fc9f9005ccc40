"""From the arguments of a transform to its plan, and to this rank's shard of the result."""

from __future__ import annotations

import itertools
from typing import Any, Unpack, cast

import torch

from distman._job.groups.registry import Group
from distman.collectives import (
    admitted,
    check_call,
    layout_of,
    linear,
    normalize_dim,
    reshard,
    resolve_group,
    shard_sizes,
    still_carried,
    tell_apart,
)
from distman.fft._arguments import (
    as_length,
    as_lengths,
    check_among,
    check_dims,
    check_norm,
    check_out_sizes,
    computable,
    cut_shards,
    fit,
    is_same_dim,
    signal_lengths,
)
from distman.fft._blocks import DUAL, TRANSFORMS, Kind
from distman.fft._plan import Plan
from distman.fft._signature import Layout


def transform_shard(
    name: str, tensor: torch.Tensor, n: Any, dim: Any, norm: str | None, **layout: Unpack[Layout]
) -> torch.Tensor:
    """Do what the transform of a name does; of one dim with its length, of several with sequences of them."""
    base = name.rstrip("2n")
    is_line = name == base
    kind = cast("Kind", {"hfft": "irfft", "ihfft": "rfft"}.get(base, base))
    shard_dim, out_dim = layout.get("shard_dim"), layout.get("out_dim")
    sizes, out_sizes, group = layout.get("sizes"), layout.get("out_sizes"), resolve_group(layout.get("group"))
    stays = shard_dim is not None and (out_dim is None or is_same_dim(tensor, shard_dim, out_dim))
    is_local = is_line and stays and out_sizes is None and not is_same_dim(tensor, shard_dim, dim)
    tensor = computable(name, kind, admitted(name, tensor, group, has_header=sizes is None, is_local=is_local))
    dims: tuple[int, ...]
    wanted: tuple[int, ...] | None
    if is_line:
        dim = normalize_dim(dim, tensor.ndim)
        shard = dim if shard_dim is None else normalize_dim(shard_dim, tensor.ndim, "shard_dim")
        out = shard if out_dim is None else normalize_dim(out_dim, tensor.ndim, "out_dim")
        dims, wanted = (dim,), (as_length(n),)
        arguments: dict[str, Any] = {"dim": dim, "n": wanted[0]}
    else:
        wanted = None if n is None else as_lengths(n)
        dims = check_dims(dim, wanted, tensor.ndim)
        there = dims if kind in ("fft", "rfft") else dims[::-1]
        shard = there[0] if shard_dim is None else check_among("shard_dim", shard_dim, dims, tensor.ndim)
        away = next(one for one in there[::-1] if one != shard)
        out = away if out_dim is None else check_among("out_dim", out_dim, dims, tensor.ndim)
        arguments = {"dims": dims, "s": wanted}
    norm = check_norm(norm)
    arguments |= {"norm": norm, "shard_dim": shard, "out_dim": out, "sizes": sizes, "out_sizes": out_sizes}
    tensor = check_call(name, tensor, group, free_dim=shard, unites_grad=sizes is None, **arguments)
    stays = shard == out and shard not in dims
    shards: list[int] = []
    if sizes is not None or out_sizes is not None or not stays:
        tensor, shards, shard = shard_sizes(name, tensor, sizes, shard, group)
    full = dict(enumerate(tensor.shape)) | ({shard: sum(shards)} if shards else {})
    lengths = signal_lengths(kind, name, {one: full[one] for one in dims}, wanted)
    half = lengths | {dims[-1]: lengths[dims[-1]] // 2 + 1}
    taken, given = half if kind == "irfft" else lengths, full | (half if kind == "rfft" else lengths)
    results = shards if stays and out_sizes is None else check_out_sizes(out_sizes, out, given[out], group)
    signal = ", ".join(f"{one} of {length}" for one, length in lengths.items())
    tell_apart(f"{layout_of(tensor, shard)} along {signal}, {norm}, {shard} in {shards} to {out} in {results}")
    if name in ("hfft", "ihfft"):
        norm = DUAL[norm]
    if name == "hfft":
        tensor = tensor.conj()
    if group.size == 1 and tensor.numel():  # torch fails on a batch of nothing
        result: torch.Tensor = TRANSFORMS[kind](tensor, list(lengths.values()), dims, norm)
    else:
        if shard in dims:
            tensor, shards = cut_shards(tensor, shard, shards, taken[shard], group.rank)
        for one in dims:
            if one != shard:
                tensor = fit(tensor, one, taken[one])
        plan = Plan(kind, dims, lengths, shard, tuple(shards), out, tuple(results), norm, group)
        result = linear(tensor, _run, _run_adjoint, plan)
        if stays and shards != results:
            result = _recut(result, out, shards, results, group)
    return result.conj_physical() if name == "ihfft" else result


def _run(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    tensor = still_carried(tensor, plan.group)
    result = plan.run(tensor.unsqueeze(-1)).squeeze(-1) if tensor.ndim == 1 else plan.run(tensor)
    return result.detach()  # no view, so that it may be changed in place


def _run_adjoint(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    return _run(tensor, plan.adjoint())


def _recut(tensor: torch.Tensor, dim: int, sizes: list[int], out_sizes: list[int], group: Group) -> torch.Tensor:
    """Return a tensor in shards of other lengths."""
    intervals, out_intervals = (
        list(itertools.pairwise(itertools.accumulate(one, initial=0))) for one in (sizes, out_sizes)
    )
    outgoing, incoming = (
        [max(0, min(end, mine[group.rank][1]) - max(start, mine[group.rank][0])) for start, end in theirs]
        for mine, theirs in ((intervals, out_intervals), (out_intervals, intervals))
    )
    return reshard(tensor, (dim, outgoing), (dim, incoming), group)
