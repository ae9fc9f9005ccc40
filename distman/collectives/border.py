"""What every collective checks before ranks talk to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman.collectives import debug
from distman.collectives.exchange import all_gather_numbers, control_device
from distman.groups import Group
from distman.manager import DistributedManager

__all__ = [
    "DTYPES",
    "MAX_NDIM",
    "GroupLike",
    "check_call",
    "check_matrix",
    "check_member",
    "check_sizes",
    "check_tensor",
    "normalize_dim",
    "resolve_group",
    "shard_sizes",
]

GroupLike = dist.ProcessGroup | str | None

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_NDIM = 16


def resolve_group(group: GroupLike) -> Group:
    """Return the group that a ``group`` argument stands for.

    Local.

    Raises:
        NotInitializedError: The manager is not initialized.
        UndefinedGroupError: There is no group of that name.
        ValueError: This rank is no member of it.
    """
    return DistributedManager().resolve_group(group)


def check_call(
    operation: str, tensor: torch.Tensor, group: Group, *, free_dim: int | None = None, **details: object
) -> None:
    """Check that a tensor can travel in the group; in debug mode, that all ranks call alike.

    Local; in debug mode collective.

    Args:
        operation: Name of the collective.
        tensor: The tensor.
        group: The group.
        free_dim: The dim in which the ranks' tensors may differ in length.
        details: What else must be equal on all ranks.

    Raises:
        TypeError: It is no tensor.
        ValueError: The group has no backend for the tensor's device.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.
    """
    if isinstance(tensor, torch.Tensor):
        free = free_dim % tensor.ndim if free_dim is not None and tensor.ndim else None
        shape = ["*" if dim == free else length for dim, length in enumerate(tensor.shape)]
        details |= {"dtype": tensor.dtype, "shape": f"({', '.join(map(str, shape))})", "grad": _needs_grad(tensor)}
    debug.compare(operation, group, **details)
    check_tensor(tensor, group)


def check_tensor(tensor: torch.Tensor, group: Group) -> None:
    """Check that a tensor can travel in the group.

    Local.

    Raises:
        TypeError: It is no tensor.
        ValueError: The group has no backend for the tensor's device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}. Pass a tensor.")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor must have a dtype that the backends carry, got {tensor.dtype}. Convert it.")
    if group.device_types and tensor.device.type not in group.device_types:
        raise ValueError(
            f"tensor must be on a device that group {group.name!r} can reach ({', '.join(group.device_types)}), got "
            f"{tensor.device}. Move it with .to(manager.device)."
        )


def normalize_dim(dim: int, ndim: int) -> int:
    """Return a dim counted from the front.

    Local.

    Raises:
        ValueError: The tensor has no such dim.
    """
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"dim must be between {-ndim} and {ndim - 1} for a tensor of {ndim} dims, got {dim}. Choose one of them."
        )
    return dim % ndim


def check_sizes(sizes: Sequence[int], group: Group) -> list[int]:
    """Return the sizes of the shards as a list.

    Local.

    Raises:
        ValueError: There is not one size for each rank of the group, or one is negative.
    """
    if len(sizes) != group.size or any(size < 0 for size in sizes):
        raise ValueError(
            f"sizes must hold one number, 0 or more, for each of the {group.size} ranks of group {group.name!r}, got "
            f"{list(sizes)}. Pass the same list on all ranks."
        )
    return [int(size) for size in sizes]


def check_matrix(sizes: Sequence[Sequence[int]], group: Group) -> list[list[int]]:
    """Return the sizes of an exchange, a row for each sender, as lists.

    Local.

    Raises:
        ValueError: It is not a square of one row and one column for each rank of the group.
    """
    if len(sizes) != group.size:
        raise ValueError(
            f"sizes must have one row for each of the {group.size} ranks of group {group.name!r}, got {len(sizes)}. "
            "Row i, column j is what rank i sends to rank j."
        )
    return [check_sizes(row, group) for row in sizes]


def check_member(name: str, rank: int, group: Group) -> None:
    """Check that a ``src`` or ``dst`` is a rank in the group.

    Local.

    Raises:
        ValueError: It is none.
    """
    if not 0 <= rank < group.size:
        raise ValueError(
            f"{name} must be a rank in group {group.name!r}, 0 to {group.size - 1}, got {rank}. "
            "It counts within the group, not in the world."
        )


def shard_sizes(
    operation: str, tensor: torch.Tensor, sizes: Sequence[int] | None, dim: int, group: Group
) -> tuple[torch.Tensor, list[int]]:
    """Return this rank's shard, ready to be gathered, and the lengths of all shards along ``dim``.

    Local where ``sizes`` are given; else collective, and a shard requires a gradient if any rank's does.

    Raises:
        ValueError: The sizes do not fit the shard; without sizes on every rank: the shards differ in dtype or in
            another dim.
    """
    if sizes is None:
        lengths, needs_grad = _exchange_shapes(operation, tensor, dim, group)
        return tensor.detach().requires_grad_() if needs_grad and not tensor.requires_grad else tensor, lengths
    lengths = check_sizes(sizes, group)
    if tensor.shape[dim] != lengths[group.rank]:
        raise ValueError(
            f"the shard of group rank {group.rank} must have length sizes[{group.rank}] = {lengths[group.rank]} along "
            f"dim {dim}, got {tensor.shape[dim]}. Pass the sizes that the shards have."
        )
    return tensor, lengths


def _needs_grad(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _exchange_shapes(operation: str, tensor: torch.Tensor, dim: int, group: Group) -> tuple[list[int], bool]:
    shape = [*tensor.shape, *[-1] * (MAX_NDIM - tensor.ndim)]
    mine = [DTYPES.index(tensor.dtype), tensor.ndim, int(_needs_grad(tensor)), *shape]
    rows = all_gather_numbers(mine, group, control_device(group, tensor.device))
    fixed = [[*row[:2], *(n for axis, n in enumerate(row[3:]) if axis != dim)] for row in rows]
    if any(other != fixed[0] for other in fixed):
        lines = [
            f"  rank {rank}: {DTYPES[row[0]]} {row[3 : 3 + row[1]]}"
            for rank, row in zip(group.ranks, rows, strict=True)
        ]
        raise ValueError(
            f"the shards of {operation} must be equal in dtype and in all dims but {dim}. Correct those that differ:\n"
            + "\n".join(lines)
        )
    return [row[3 + dim] for row in rows], any(row[2] for row in rows)
