"""What every collective checks before ranks talk to each other."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._coordination.tracking import check_all_run_here, current_wait
from distman._job.groups.registry import Group
from distman.collectives import _debug
from distman.collectives._border import (
    DTYPES,
    MAX_NDIM,
    REFUSED,
    carried,
    raise_refusals,
    refuse,
    refuse_beside,
    refuse_in_header,
)
from distman.collectives._exchange import all_gather_numbers
from distman.manager import DistributedManager
from distman.topology import is_whole_number

GroupLike = dist.ProcessGroup | str | None


def resolve_group(group: GroupLike) -> Group:
    """Return the group that a ``group`` argument stands for, of which this rank is a member and all ranks run here."""
    members = DistributedManager().resolve_group(group)
    if not torch.compiler.is_compiling():
        check_all_run_here(members.ranks)
    return members


def admitted(
    operation: str,
    tensor: torch.Tensor,
    group: Group,
    *,
    name: str = "tensor",
    has_header: bool = False,
    is_local: bool = False,
) -> torch.Tensor:
    """Return a tensor as one that can travel in the group; the ranks that wait for this one hear of a refusal.

    ``has_header``: the call begins with an exchange of sizes. ``is_local``: nobody waits in the call.
    """
    try:
        return carried(tensor, group, name)
    except (TypeError, ValueError) as error:
        refuse(error, operation, group, None if is_local else refuse_in_header if has_header else refuse_beside)


def check_call(
    operation: str,
    tensor: torch.Tensor,
    group: Group,
    *,
    name: str = "tensor",
    free_dim: int | None = None,
    unites_grad: bool = False,
    is_local: bool = False,
    **details: object,
) -> torch.Tensor:
    """Return a tensor as one that can travel in the group; in debug mode, check that all ranks call alike.

    The ranks' tensors may differ in length along ``free_dim``. ``unites_grad``: the ranks tell each other their sizes,
    and need not agree on whether a gradient is required. Dims among ``details`` count from either end.
    """
    tensor = admitted(operation, tensor, group, name=name, has_header=unites_grad, is_local=is_local)
    if _debug.is_on():
        free = _from_front(free_dim, tensor.ndim)
        shape = ["*" if dim == free else str(length) for dim, length in enumerate(tensor.shape)]
        details = {
            name: _from_front(value, tensor.ndim) if name.startswith("dim") else value
            for name, value in details.items()
        }
        details |= {"dtype": tensor.dtype, "shape": f"({', '.join(shape)})"}
        if not unites_grad:
            details["grad"] = _needs_grad(tensor)
    _debug.compare_calls(operation, group, **details)
    wait = current_wait()
    if wait is not None and not unites_grad:
        wait.note += f" gradient {_needs_grad(tensor)}"
    return tensor


def _from_front(dim: object, ndim: int) -> object:
    return dim % ndim if isinstance(dim, int) and -ndim <= dim < ndim else dim


def normalize_dim(dim: int, ndim: int, name: str = "dim") -> int:
    if ndim == 0:
        raise ValueError("tensor must have at least one dim, got a scalar. Give it one with tensor.reshape(1).")
    if not is_whole_number(dim) or not -ndim <= dim < ndim:
        raise ValueError(
            f"{name} must be between {-ndim} and {ndim - 1} for a tensor of {ndim} dims, got {dim!r}. "
            "Choose one of these dims."
        )
    return dim % ndim


def check_sizes(sizes: Sequence[int], group: Group, name: str = "sizes") -> list[int]:
    try:
        numbers = [operator.index(size) for size in sizes]
    except TypeError:
        numbers = []
    if len(numbers) != group.size or min(numbers) < 0:
        raise ValueError(
            f"{name} must hold one number, 0 or more, for each of the {group.size} ranks of group {group.name!r}, got "
            f"{sizes!r}. Pass the same list on all ranks."
        )
    return numbers


def check_matrix(sizes: Sequence[Sequence[int]], group: Group) -> list[list[int]]:
    """Return the sizes of an exchange, a row for each sender, as lists."""
    if len(sizes) != group.size:
        raise ValueError(
            f"sizes must have one row for each of the {group.size} ranks of group {group.name!r}, got {len(sizes)}. "
            "Row i, column j is what rank i sends to rank j."
        )
    return [check_sizes(row, group) for row in sizes]


def check_member(name: str, rank: int, group: Group) -> None:
    if not is_whole_number(rank) or not 0 <= rank < group.size:
        raise ValueError(
            f"{name} must be a rank in group {group.name!r}, 0 to {group.size - 1}, got {rank!r}. "
            "It counts within the group, not in the world."
        )


def shard_sizes(
    operation: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: Group
) -> tuple[torch.Tensor, list[int], int]:
    """Return this rank's shard, ready to be gathered, the lengths of all shards along ``dim``, and that dim.

    Without ``sizes`` the ranks exchange them, and a shard requires a gradient if any rank's does.
    """
    if sizes is None:
        lengths, needs_grad = _exchange_shapes(operation, tensor, dim, group)
        if needs_grad and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        return tensor, lengths, dim % tensor.ndim
    dim, lengths = normalize_dim(dim, tensor.ndim), check_sizes(sizes, group)
    if tensor.shape[dim] != lengths[group.rank]:
        raise ValueError(
            f"the shard of group rank {group.rank} must have length sizes[{group.rank}] = {lengths[group.rank]} along "
            f"dim {dim}, got {tensor.shape[dim]}. Pass the sizes that the shards have."
        )
    return tensor, lengths, dim


def _needs_grad(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _exchange_shapes(operation: str, tensor: torch.Tensor, dim: int, group: Group) -> tuple[list[int], bool]:
    problem = None
    try:
        dim = normalize_dim(dim, tensor.ndim)
    except ValueError as error:
        dim, problem = -1, error
    shape = [*tensor.shape, *[-1] * (MAX_NDIM - tensor.ndim)]
    mine = [dim, DTYPES.index(tensor.dtype), tensor.ndim, int(_needs_grad(tensor)), *shape]
    rows = all_gather_numbers(mine, group)
    if REFUSED in [row[1] for row in rows]:
        raise_refusals(group)
    if problem is not None:
        raise problem
    fixed = [[*row[:3], *(length for axis, length in enumerate(row[4:]) if axis != dim)] for row in rows]
    if any(other != fixed[0] for other in fixed):
        lines = [
            f"  rank {rank}: dim {row[0] if row[0] >= 0 else 'out of range'} of {DTYPES[row[1]]} {row[4 : 4 + row[2]]}"
            for rank, row in zip(group.ranks, rows, strict=True)
        ]
        raise ValueError(
            f"the shards of {operation} must be equal in dim, in dtype and in all dims but {dim}. They are:\n"
            + "\n".join(lines)
        )
    return [row[4 + dim] for row in rows], any(row[3] for row in rows)
