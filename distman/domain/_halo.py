"""A shard with a halo of its neighbours' entries, and the sum of such halos: each is the other's adjoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from distman._base.arguments import check_choice
from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman.collectives import (
    GroupLike,
    check_call,
    check_sizes,
    exchange,
    layout_of,
    linear,
    new_empty,
    normalize_dim,
    resolve_group,
    shard_sizes,
    still_carried,
)
from distman.domain._axes import Boundary, Windows, longest_halo, plan
from distman.topology import is_whole_number

Halo = int | tuple[int, int]


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in whose dtype sums are exact enough."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Along(NamedTuple):
    """What is to be done along one dim."""

    dim: int
    halo: tuple[int, int]
    boundary: Boundary
    sizes: Sequence[int] | None
    group: Group

    def checked(self, operation: str, tensor: torch.Tensor) -> torch.Tensor:
        details: dict[str, Any] = {"dim": self.dim, "halo": self.halo, "boundary": self.boundary, "sizes": self.sizes}
        return check_call(operation, tensor, self.group, free_dim=self.dim, unites_grad=self.sizes is None, **details)


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
    for along in _each_dim(tensor, halo, dim, boundary, sizes, group):
        tensor = along.checked("halo_exchange", tensor)
        tensor, lengths, axis = shard_sizes("halo_exchange", tensor, along.sizes, along.dim, along.group)
        windows = checked_windows(along.dim, lengths, along.halo, along.boundary)
        tensor = linear(tensor, fetch, deposit, axis, windows, along.group)
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
    for along in reversed(_each_dim(tensor, halo, dim, boundary, sizes, group)):
        tensor, axis, windows = _windows_within(along.checked("halo_reduce", tensor), along)
        tensor = linear(tensor, deposit, fetch, axis, windows, along.group)
    return tensor


def _each_dim(tensor: torch.Tensor, halo: Any, dim: Any, boundary: Any, sizes: Any, group: Any) -> list[_Along]:
    """Return the arguments for one dim after the other."""
    several = not isinstance(dim, int)
    dims = list(dim) if several else [dim]
    arguments = {"halo": halo, "boundary": boundary, "sizes": sizes, "group": group}
    for name, given in arguments.items():
        arguments[name] = list(given) if several and isinstance(given, list | tuple) else [given] * len(dims)
        if len(arguments[name]) != len(dims):
            raise ValueError(
                f"{name} must have one entry for each of the {len(dims)} dims {tuple(dims)}, got "
                f"{len(arguments[name])}. Pass as many as dims."
            )
    members = [resolve_group(one) for one in arguments["group"]]
    wide = [one.ranks for one in members if one.size > 1]
    if len(set(wide)) < len(wide):
        raise ValueError(
            f"group must be another one for each of the dims {tuple(dims)}, got {arguments['group']}. Pass the groups "
            "of the axes of a mesh."
        )
    if isinstance(tensor, torch.Tensor) and len({one % tensor.ndim for one in dims if tensor.ndim}) < len(dims):
        raise ValueError(f"dim must hold different dims, got {tuple(dims)}. Name each dim once.")
    halos = map(pair, arguments["halo"])
    return list(map(_Along, dims, halos, arguments["boundary"], arguments["sizes"], members))


def pair(halo: Any) -> tuple[int, int]:
    numbers = tuple(halo) if isinstance(halo, list | tuple) else (halo, halo)
    if len(numbers) != 2 or not all(is_whole_number(number) and number >= 0 for number in numbers):
        raise ValueError(
            f"halo must be a number of entries, 0 or more, or two of them, got {halo!r}. Pass how many the shard needs "
            "before and after."
        )
    return numbers


def checked_windows(dim: int, sizes: Sequence[int], halo: tuple[int, int], boundary: Boundary) -> Windows:
    """Return the shards with their halos, if the field has such; with "none" they end where the field does."""
    check_choice("boundary", boundary, get_args(Boundary))
    most = longest_halo(boundary, sum(sizes))
    if max(halo) > most:
        raise ValueError(
            f"halo must be at most {most} where a tensor of length {sum(sizes)} along dim {dim} continues by "
            f"{boundary!r}, got {halo}. Choose a smaller halo, or another boundary."
        )
    ends = list(itertools.accumulate(sizes))
    bounds = [(end - size - halo[0], end + halo[1]) for size, end in zip(sizes, ends, strict=True)]
    if boundary == "none":
        bounds = [(max(start, 0), min(end, ends[-1])) for start, end in bounds]
    return Windows(tuple(sizes), tuple(bounds), boundary)


def _windows_within(tensor: torch.Tensor, along: _Along) -> tuple[torch.Tensor, int, Windows]:
    """Return this rank's window, ready to be added up, its dim, and the windows of all ranks."""
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
    return tensor, axis, windows


def fetch(tensor: torch.Tensor, dim: int, windows: Windows, group: Group) -> torch.Tensor:
    """Return this rank's window of a dim, of which the ranks whose shards it touches send their parts."""
    tensor = still_carried(tensor, group)
    kept, incoming, outgoing, _, beyond = plan(windows, group.rank, tensor.device)
    result = _empty(tensor, dim, windows.length(group.rank)).index_fill_(dim, beyond, 0)
    own = tensor.narrow(dim, kept[0], kept[2]), result.narrow(dim, kept[1], kept[2])
    sent = {rank: tensor.index_select(dim, entries) for rank, entries in outgoing.items()}
    what = f"windows {layout_of(tensor, dim)} dim {dim} {windows.text}"
    for rank, piece in _swapped(sent, incoming, own, dim, group, what):
        result.index_copy_(dim, incoming[rank], piece)
    return result


def deposit(tensor: torch.Tensor, dim: int, windows: Windows, group: Group) -> torch.Tensor:
    """Return this rank's shard of the sum of all windows."""
    tensor = still_carried(tensor, group)
    kept, incoming, outgoing, repeated, _ = plan(windows, group.rank, tensor.device)
    result = _empty(tensor, dim, windows.sizes[group.rank])
    before, own_result, behind = result.tensor_split([kept[0], kept[0] + kept[2]], dim)
    before.zero_()
    behind.zero_()
    own = tensor.narrow(dim, kept[1], kept[2]), own_result
    sent = {rank: tensor.index_select(dim, entries) for rank, entries in incoming.items()}
    what = f"sums of windows {layout_of(tensor, dim)} dim {dim} {windows.text}"
    pieces = _swapped(sent, outgoing, own, dim, group, what)
    total = computable(result)
    for rank, piece in pieces:
        add(total, dim, outgoing[rank], computable(piece), in_order=rank in repeated and not total.is_cpu)
    return total.to(tensor.dtype)


def add(total: torch.Tensor, dim: int, entries: torch.Tensor, piece: torch.Tensor, *, in_order: bool) -> None:
    """Add to some entries of a dim. On a GPU, those that are named twice are added to in any order unless told."""
    if in_order:  # which takes a copy of all
        total.movedim(dim, 0).index_put_((entries,), piece.movedim(dim, 0), accumulate=True)
    else:
        total.index_add_(dim, entries, piece)


def _swapped(
    sent: dict[int, torch.Tensor],
    received: dict[int, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    dim: int,
    group: Group,
    what: str,
) -> list[tuple[int, torch.Tensor]]:
    """Send the others their parts, copy this rank's own meanwhile, and return what came for places, in rank order."""
    nothing = own[0].narrow(dim, 0, 0)
    sends = [sent.get(rank, nothing) for rank in range(group.size)]
    receives = [nothing] * group.size
    for rank, indices in received.items():
        receives[rank] = _empty(nothing, dim, len(indices))
    sends[group.rank], receives[group.rank] = own
    exchange(sends, receives, group, what)
    receives[group.rank] = sent.get(group.rank, nothing)
    return [(rank, receives[rank]) for rank in sorted(received)]


def _empty(like: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return new_empty(like, shape)
