"""A shard with a halo of its neighbours' entries, and the sum of such halos: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman._torch_internals import EagerFunction
from distman.collectives import (
    GroupLike,
    check_call,
    check_sizes,
    exchange,
    layout_of,
    new_empty,
    normalize_dim,
    resolve_group,
    shard_sizes,
    still_carried,
)
from distman.domain._axes import BOUNDARIES, Boundary, Run, Runs, Windows, gaps, halo_windows, longest_halo, plan
from distman.topology import is_whole_number

_IN_FLOAT32 = (torch.float16, torch.bfloat16)
Halo = int | tuple[int, int]


class _Along(NamedTuple):
    """What is to be done along one dim."""

    dim: int
    halo: tuple[int, int]
    boundary: Boundary
    sizes: Sequence[int] | None
    group: Group


@collective
def halo_exchange(
    tensor: torch.Tensor,
    halo: Halo | Sequence[Halo],
    dim: int | Sequence[int],
    *,
    boundary: Boundary | Sequence[Boundary] = "zeros",
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    group: GroupLike | Sequence[GroupLike] = None,
) -> torch.Tensor:
    """Return this rank's shard with a halo: the entries of the full tensor just before and after it.

    Collective. Blocking. Differentiable: the gradients of halos travel back and are added up. Only ranks whose shards
    a halo touches send anything: two messages for each rank and dim, unless a halo is wider than the next shard.

    Args:
        tensor: This rank's shard, shape ``(*, n, *)`` with n at ``dim``; n may differ between ranks and be 0.
        halo: Entries before and after the shard: a number, or a pair. The same on all ranks.
        dim: The sharded dim, or a sequence of them. Then there is a group for each, the other arguments may be
            sequences with an entry for each dim, and the halo has corners.
        boundary: What is beyond the ends of the full tensor: ``"zeros"``; ``"circular"``, its other end;
            ``"reflect"``, its mirror image about the last entry; ``"replicate"``, its last entry; ``"none"``, no halo.
        sizes: The n of every rank along ``dim``, the same list on all ranks; None lets the ranks exchange them.
        group: A process group, the name of one, or None for the world; its ranks hold the shards in their order.

    Returns:
        A new tensor, shape ``(*, before + n + after, *)``, of which the ranks at the ends lack what ``"none"`` leaves
        out.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: On every rank: halo, dim, boundary, sizes or group do not fit, or a halo is as long as the full
            tensor, where it is reflected, or longer, where it is circular.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> shard = torch.arange(3) + 3 * rank
        >>> all_gather_objects(halo_exchange(shard, 1, 0, boundary="circular").tolist())
        [[5, 0, 1, 2, 3], [2, 3, 4, 5, 0]]
    """
    prepared = []
    for along in _each_dim(tensor, halo, dim, boundary, sizes, group):
        tensor = _checked("halo_exchange", tensor, along)
        tensor, lengths, axis = shard_sizes("halo_exchange", tensor, along.sizes, along.dim, along.group)
        prepared.append((axis, checked_windows(along.dim, lengths, along.halo, along.boundary), along.group))
    for axis, windows, members in prepared:
        tensor = Fetch.apply(tensor, axis, windows, members)
    return tensor


@collective
def halo_reduce(
    tensor: torch.Tensor,
    halo: Halo | Sequence[Halo],
    dim: int | Sequence[int],
    *,
    boundary: Boundary | Sequence[Boundary] = "zeros",
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    group: GroupLike | Sequence[GroupLike] = None,
) -> torch.Tensor:
    """Add each rank's halos to the entries of the shards that they stand for: the adjoint of :func:`halo_exchange`.

    Collective. Blocking. Differentiable: the gradient is exchanged by :func:`halo_exchange`. 16-bit floats are added
    up in float32.

    Args:
        tensor: This rank's shard with its halos, shaped as :func:`halo_exchange` returns it.
        halo: Entries before and after the shard: a number, or a pair. The same on all ranks.
        dim: The sharded dim, or a sequence of them, as in :func:`halo_exchange`.
        boundary: What the halos beyond the ends of the full tensor stand for; those of ``"zeros"`` are dropped.
        sizes: Lengths of the shards without halos along ``dim``, the same list on all ranks; None lets the ranks
            exchange them, unless the boundary is ``"none"``.
        group: A process group, the name of one, or None for the world.

    Returns:
        The shard, a new tensor, shape ``(*, n, *)``.

    Raises:
        TypeError, PlanMismatchError: As :func:`halo_exchange` does.
        ValueError: On every rank: halo, dim, boundary, sizes or group do not fit, nor the tensor to these.

    Example on two ranks:
        >>> all_gather_objects(halo_reduce(torch.ones(4), 1, 0).tolist())  # of two entries, one is in the other's halo
        [[1.0, 2.0], [2.0, 1.0]]
    """
    prepared = []
    for along in _each_dim(tensor, halo, dim, boundary, sizes, group):
        tensor = _checked("halo_reduce", tensor, along)
        tensor, windows, axis = _windows_within(tensor, along)
        prepared.append((axis, windows, along.group))
    for axis, windows, members in reversed(prepared):
        tensor = Deposit.apply(tensor, axis, windows, members)
    return tensor


def _each_dim(tensor: torch.Tensor, halo: Any, dim: Any, boundary: Any, sizes: Any, group: Any) -> list[_Along]:
    """Return the arguments for one dim after the other."""
    several = not isinstance(dim, int)
    dims = list(dim) if several else [dim]
    halos = list(halo) if several and not isinstance(halo, int) else [halo] * len(dims)
    boundaries: list[Any] = [boundary] * len(dims) if isinstance(boundary, str) else list(boundary)
    lists = list(sizes) if several and sizes is not None else [sizes] * len(dims)
    groups = list(group) if several and isinstance(group, list | tuple) else [group] * len(dims)
    for name, given in (("halo", halos), ("boundary", boundaries), ("sizes", lists), ("group", groups)):
        if len(given) != len(dims):
            raise ValueError(
                f"{name} must have one entry for each of the {len(dims)} dims {tuple(dims)}, got {len(given)}. Pass as "
                "many as dims."
            )
    members = [resolve_group(one) for one in groups]
    wide = [one.ranks for one in members if one.size > 1]
    if len(set(wide)) < len(wide):
        raise ValueError(
            f"group must be another one for each of the dims {tuple(dims)}, got {groups}. Pass the groups of the axes "
            "of a mesh."
        )
    if isinstance(tensor, torch.Tensor) and len({one % tensor.ndim for one in dims if tensor.ndim}) < len(dims):
        raise ValueError(f"dim must hold different dims, got {tuple(dims)}. Name each dim once.")
    return [
        _Along(one, pair(width), bound, listed, of)
        for one, width, bound, listed, of in zip(dims, halos, boundaries, lists, members, strict=True)
    ]


def pair(halo: Any) -> tuple[int, int]:
    numbers = tuple(halo) if isinstance(halo, list | tuple) else (halo, halo)
    if len(numbers) != 2 or not all(is_whole_number(number) and number >= 0 for number in numbers):
        raise ValueError(
            f"halo must be a number of entries, 0 or more, or two of them, got {halo!r}. Pass how many the shard needs "
            "before and after."
        )
    return numbers


def _checked(operation: str, tensor: torch.Tensor, along: _Along) -> torch.Tensor:
    return check_call(
        operation,
        tensor,
        along.group,
        free_dim=along.dim,
        unites_grad=along.sizes is None,
        dim=along.dim,
        halo=along.halo,
        boundary=along.boundary,
        sizes=along.sizes,
    )


def checked_windows(dim: int, sizes: Sequence[int], halo: tuple[int, int], boundary: Boundary) -> Windows:
    """Return the shards with their halos, if the field has such."""
    if boundary not in BOUNDARIES:
        raise ValueError(f"boundary must be one of {', '.join(BOUNDARIES)}, got {boundary!r}. Choose one.")
    most = longest_halo(boundary, sum(sizes))
    if max(halo) > most:
        raise ValueError(
            f"halo must be at most {most} where a tensor of length {sum(sizes)} along dim {dim} continues by "
            f"{boundary!r}, got {halo}. Choose a smaller halo, or another boundary."
        )
    return halo_windows(sizes, *halo, boundary)


def _windows_within(tensor: torch.Tensor, along: _Along) -> tuple[torch.Tensor, Windows, int]:
    """Return the windows of which this rank holds one, and the dim."""
    axis = normalize_dim(along.dim, tensor.ndim)
    if along.sizes is not None:
        lengths = check_sizes(along.sizes, along.group)
    elif along.boundary == "none":
        raise ValueError("sizes must be given where the boundary is 'none', got None. Pass the lengths of the shards.")
    else:
        tensor, padded, axis = shard_sizes("halo_reduce", tensor, None, along.dim, along.group)
        lengths = [length - sum(along.halo) for length in padded]
        if min(lengths) < 0:
            raise ValueError(
                f"tensor must hold its halos {along.halo} along dim {along.dim} on every rank, got lengths {padded}. "
                "Pass what halo_exchange returns."
            )
    windows = checked_windows(along.dim, lengths, along.halo, along.boundary)
    if tensor.shape[axis] != windows.length(along.group.rank):
        raise ValueError(
            f"tensor must have length {windows.length(along.group.rank)} along dim {along.dim}, that of a shard of "
            f"{lengths[along.group.rank]} with its halos {along.halo}, got {tensor.shape[axis]}. Pass what "
            "halo_exchange returns."
        )
    return tensor, windows, axis


class Fetch(EagerFunction):
    """This rank's window of a dim, of which the ranks whose shards it touches send their parts.

    What no shard has gets a value, which is not part of the linear map: the adjoint's adjoint has zeros there.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, windows: Windows, group: Group, value: float = 0.0
    ) -> torch.Tensor:
        ctx.arguments = dim, windows, group
        tensor = still_carried(tensor, group)
        incoming, outgoing, beyond = plan(windows, group.rank)
        result = _empty(tensor, dim, windows.length(group.rank))
        for start, end in beyond:
            result.narrow(dim, start, end - start).fill_(value)
        sends, receives = ([tensor.narrow(dim, 0, 0)] * group.size for _ in range(2))
        for rank, runs in outgoing.items():
            sends[rank] = _joined([_taken(tensor, dim, run) for run in runs], dim)
        for rank, runs in incoming.items():
            receives[rank] = _place(result, dim, runs[0]) if _is_plain(runs) else _empty(tensor, dim, _num_sent(runs))
        main, others = _own(incoming, group)
        sends[group.rank] = _taken(tensor, dim, main)  # copied while the others travel
        receives[group.rank] = _place(result, dim, main)
        exchange(sends, receives, group, f"windows {layout_of(tensor, dim)} dim {dim} {windows.text}")
        pieces = [(run, _taken(tensor, dim, run)) for run in others]
        for rank, runs in incoming.items():
            if rank != group.rank and not _is_plain(runs):
                pieces += _split(receives[rank], runs, dim)
        for run, piece in pieces:
            _place(result, dim, run).copy_(piece.flip(dim) if run.step < 0 else piece)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return Deposit.apply(grad, *ctx.arguments), None, None, None, None


class Deposit(EagerFunction):
    """This rank's shard of the sum of all windows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, windows: Windows, group: Group) -> torch.Tensor:
        ctx.arguments = dim, windows, group
        tensor = still_carried(tensor, group)
        incoming, outgoing, _ = plan(windows, group.rank)
        result = _empty(tensor, dim, windows.sizes[group.rank])
        sends, receives = ([tensor.narrow(dim, 0, 0)] * group.size for _ in range(2))
        for rank, runs in incoming.items():
            if rank != group.rank:
                sends[rank] = _joined([_folded(tensor, dim, run) for run in runs], dim)
        for rank, runs in outgoing.items():
            receives[rank] = _empty(tensor, dim, _num_sent(runs))
        main, others = _own(incoming, group)
        sends[group.rank] = _place(tensor, dim, main)  # copied while the others travel
        receives[group.rank] = _taken(result, dim, main)
        for start, end in gaps([(main.source, main.source + main.length)], windows.sizes[group.rank]):
            result.narrow(dim, start, end - start).zero_()
        exchange(sends, receives, group, f"sums of windows {layout_of(tensor, dim)} dim {dim} {windows.text}")
        total = result.float() if tensor.dtype in _IN_FLOAT32 else result
        pieces = [(run, _folded(tensor, dim, run)) for run in others]
        for rank in sorted(outgoing):  # the order in which parts are added up
            if rank != group.rank:
                pieces += _split(receives[rank], outgoing[rank], dim)
        for run, piece in pieces:
            _taken(total, dim, run).add_(piece)
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return Fetch.apply(grad, *ctx.arguments), None, None, None


def _own(incoming: Runs, group: Group) -> tuple[Run, list[Run]]:
    """Return the longest run that a rank's window has of its own shard as it is, maybe empty, and the others."""
    runs = sorted(incoming.get(group.rank, []), key=lambda run: -run.length if run.step == 1 else 0)
    if runs and runs[0].step == 1:
        return runs[0], runs[1:]
    return Run(0, 0, 0), runs


def _is_plain(runs: Sequence[Run]) -> bool:
    """Return whether what another rank sends can be received in its place."""
    return len(runs) == 1 and runs[0].step == 1


def _taken(shard: torch.Tensor, dim: int, run: Run) -> torch.Tensor:
    return shard.narrow(dim, run.source, run.num_sent)


def _place(window: torch.Tensor, dim: int, run: Run) -> torch.Tensor:
    return window.narrow(dim, run.target, run.length)


def _empty(like: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return new_empty(like, shape)


def _num_sent(runs: Sequence[Run]) -> int:
    return sum(run.num_sent for run in runs)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _split(message: torch.Tensor, runs: Sequence[Run], dim: int) -> list[tuple[Run, torch.Tensor]]:
    return list(zip(runs, message.split_with_sizes([run.num_sent for run in runs], dim), strict=True))


def _folded(window: torch.Tensor, dim: int, run: Run) -> torch.Tensor:
    """Return what a run of a window adds to the entries that it was made of, in their order."""
    part = _place(window, dim, run)
    if run.step == 0:
        return part.sum(dim, keepdim=True, dtype=part.dtype)
    return part.flip(dim) if run.step < 0 else part
