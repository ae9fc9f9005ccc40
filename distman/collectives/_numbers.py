"""Numbers and bytes that the ranks of a group tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group, process_group_of
from distman.collectives._exchange import ClosedByErrors, announce, exchange
from distman.errors import PlanMismatchError

_MAX_NUMBERS = 24  # broadcast by any call: then messages of calls that differ are of one length
_PART_BYTES = 2**24  # of a broadcast through memory: smaller parts cost more messages, larger ones more waiting


def control_device(group: Group, device: torch.device) -> torch.device:
    """Return the device on which small messages about tensors of ``device`` travel: the CPU where the group can."""
    return device if group.device_types and "cpu" not in group.device_types else torch.device("cpu")


@collective
def all_gather_numbers(numbers: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    if group.size == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    full = mine.new_empty(group.size, len(numbers))
    exchange([mine] * group.size, full.unbind(), group, f"{len(numbers)} numbers")
    rows: list[list[int]] = full.tolist()
    return rows


@collective
def broadcast_numbers(numbers: Sequence[int], src: int, group: Group, device: torch.device) -> list[int]:
    """Return the numbers of one rank of the group on all of them; all bring as many."""
    if group.size == 1:
        return list(numbers)
    call, sign = announce(group, f"from group rank {src}")
    numbers = list(numbers) if group.rank == src else [0] * len(numbers)
    message = torch.tensor([sign, *numbers, *[0] * (_MAX_NUMBERS - len(numbers))], dtype=torch.int64, device=device)
    broadcast(message, src, group)
    found, *received = message.tolist()
    if found != sign:
        raise PlanMismatchError(
            f"rank {group.ranks[src]} must make the same call as this rank, got another one from there, and here: "
            f"{call.text}. DISTMAN_DEBUG=1 shows both."
        )
    return received[: len(numbers)]


def broadcast(tensor: torch.Tensor, src: int, group: Group) -> None:
    with ClosedByErrors(group):
        dist.broadcast(tensor, group=process_group_of(group), group_src=src)


@collective
def broadcast_parts(tensor: torch.Tensor, src: int, group: Group) -> None:
    """Fill a tensor of one dim on the CPU from one rank, which writes one part while the others read another."""
    nothing = tensor[:0]
    for part in tensor.split(_PART_BYTES // tensor.itemsize):
        # From the others comes a byte, by which the source knows that they have read the part before.
        marks = list(torch.ones(group.size, dtype=torch.uint8, device="cpu").split(1))
        if group.rank == src:
            sends, receives = [part] * group.size, marks
        else:
            sends, receives = [nothing] * group.size, [nothing] * group.size
            sends[src] = marks[src]
        receives[src] = part
        exchange(sends, receives, group, f"parts from group rank {src}")
