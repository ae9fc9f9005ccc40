"""The one primitive under the collectives: every rank sends a piece to every other, straight into its place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._coordination.tracking import check_all_run_here
from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman.errors import DistmanError

_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_TAG = 0x646D  # keeps our messages from meeting sends and receives of the program


@collective
def exchange(sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], group: Group) -> None:
    """Send the i-th tensor to the i-th rank of the group, and fill the i-th receive with what that rank sent.

    Collective. Blocking. Empty pieces do not travel.

    Args:
        sends: One tensor for each rank of the group, this one included; never changed.
        receives: One tensor for each rank, of shape and dtype of what it sends; views of an output may be strided.
        group: The group.
    """
    # Before the first message, so that none is left behind. A forward pass has asked already.
    check_all_run_here(group.ranks, "the backward pass of a collective")
    buffers = {
        rank: piece if piece.is_contiguous() else torch.empty_like(piece, memory_format=torch.contiguous_format)
        for rank, piece in enumerate(receives)
        if rank != group.rank and piece.numel()
    }
    peer = dict(enumerate(group.ranks))
    pg = process_group_of(group)
    operations = [dist.P2POp(dist.irecv, _as_real(buffer), peer[rank], pg, _TAG) for rank, buffer in buffers.items()]
    packed: dict[int, torch.Tensor] = {}
    for step in range(1, group.size):
        rank = (group.rank + step) % group.size
        if sends[rank].numel():
            key = id(sends[rank])
            if key not in packed:
                packed[key] = sends[rank].resolve_conj().resolve_neg().contiguous()
            piece = packed[key]
            operations.append(dist.P2POp(dist.isend, _as_real(piece), peer[rank], pg, _TAG))
    _connect(receives[group.rank].device, pg)
    works = dist.batch_isend_irecv(operations) if operations else ()
    if receives[group.rank] is not sends[group.rank]:
        receives[group.rank].copy_(sends[group.rank])  # while the others travel
    for work in works:
        work.wait()
    for rank, buffer in buffers.items():
        if buffer is not receives[rank]:
            receives[rank].copy_(buffer)


def process_group_of(group: Group) -> dist.ProcessGroup | None:
    """Return what carries the collectives of a group; None on one process without a process group.

    Raises:
        DistmanError: It was destroyed; torch would take None for the world.
    """
    process_group = group.process_group
    if process_group is None and group.size > 1:
        raise DistmanError(
            f"group {group.name!r} of ranks {list(group.ranks)} must exist as long as it is used, backward passes "
            "included, got one that was destroyed. Run them first."
        )
    return process_group


def _connect(device: torch.device, process_group: dist.ProcessGroup | None) -> None:
    """Let all ranks of an NCCL group take part in its first operation, as NCCL demands; later ones need not."""
    if device.type == "cuda" and process_group is not None and process_group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=process_group)
        _connected.add(process_group)


def sum_pieces(pieces: Sequence[torch.Tensor], own: int, *, use_fp32: bool) -> torch.Tensor:
    """Return the sum of tensors of one shape, in rank order, as a new tensor or in one of them.

    Args:
        pieces: The tensors; all but ``pieces[own]`` may be written to.
        own: Index of the one that is never changed.
        use_fp32: Add 16-bit floats up in float32.
    """
    first, *others = pieces
    if not others:
        return first.clone()
    if use_fp32 and first.dtype in (torch.float16, torch.bfloat16):
        total = first.to(torch.float32)
    else:
        second = others.pop(0)
        total = torch.add(first, second, out=second if own == 0 else first)
    for piece in others:
        total += piece
    return total.to(first.dtype)


def control_device(group: Group, device: torch.device) -> torch.device:
    """Return the device on which small messages about tensors of ``device`` travel: the CPU where the group can."""
    return device if group.device_types and "cpu" not in group.device_types else torch.device("cpu")


@collective
def all_gather_numbers(numbers: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """Return what each rank of the group brought, in rank order.

    Collective. Blocking.

    Args:
        numbers: As many 64-bit integers on every rank.
        group: The group.
        device: See :func:`control_device`.
    """
    if group.size == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    full = mine.new_empty(group.size * len(numbers))
    dist.all_gather_single(full, mine, group=process_group_of(group))
    rows: list[list[int]] = full.view(group.size, -1).tolist()
    return rows


@collective
def broadcast_numbers(numbers: Sequence[int], src: int, group: Group, device: torch.device) -> list[int]:
    """Return the numbers of one rank of the group on all of them.

    Collective. Blocking.

    Args:
        numbers: As many 64-bit integers on every rank; read on ``src`` only.
        src: Rank in the group.
        group: The group.
        device: See :func:`control_device`.
    """
    if group.size == 1:
        return list(numbers)
    message = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.broadcast(message, group=process_group_of(group), group_src=src)
    received: list[int] = message.tolist()
    return received


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
