"""Numbers and bytes that the ranks of a group tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._coordination.tracking import current_wait
from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import despite_traces
from distman.collectives._exchange import ClosedByErrors, announce, exchange
from distman.errors import PlanMismatchError
from distman.manager import DistributedManager

_MAX_NUMBERS = 24  # broadcast by any call: then messages of calls that differ are of one length
_PART_BYTES = 2**24  # of a broadcast through memory: smaller parts cost more messages, larger ones more waiting


def control_device(group: Group, device: torch.device | None = None) -> torch.device:
    """Return where small messages about tensors of ``device`` are: on the CPU if the group can send them from there."""
    if not group.device_types or "cpu" in group.device_types:
        return torch.device("cpu")
    return device or DistributedManager().device


@collective
def all_gather_numbers(numbers: Sequence[int], group: Group) -> list[list[int]]:
    if group.size == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=control_device(group))
    full = mine.new_empty(group.size, len(numbers))
    exchange([mine] * group.size, full.unbind(), group, f"{len(numbers)} numbers")
    rows: list[list[int]] = full.tolist()
    return rows


@collective
@despite_traces
def all_gather_texts(text: str, group: Group) -> list[str]:
    """Return what each rank says, though these come from different calls."""
    if group.size == 1:
        return [text]
    wait = current_wait()
    if wait is not None:
        wait.note = "what each rank brings"
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(control_device(group))
    found = [mine.new_empty(length) for (length,) in all_gather_numbers([len(mine)], group)]
    exchange([mine] * group.size, found, group, "texts")
    return [one.cpu().numpy().tobytes().decode(errors="replace").strip() for one in found]


@collective
def broadcast_numbers(numbers: Sequence[int], src: int, group: Group) -> list[int]:
    """Return the numbers of one rank of the group on all of them; all bring as many."""
    if group.size == 1:
        return list(numbers)
    call, sign = announce(group, f"from group rank {src}")
    numbers = list(numbers) if group.rank == src else [0] * len(numbers)
    filling = [0] * (_MAX_NUMBERS - len(numbers))
    message = torch.tensor([sign, *numbers, *filling], dtype=torch.int64, device=control_device(group))
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
