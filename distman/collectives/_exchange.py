"""What is under the collectives: every rank sends a piece, or numbers, to every other, straight into its place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from distman._coordination.monitor.refusals import know
from distman._coordination.tracking import Call, check_all_run_here, current_wait, end_waits
from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import despite_traces
from distman.collectives._result_memory import new_empty
from distman.collectives._sums import SumInRankOrder
from distman.collectives._transport import Segment, begin_all_reduce as begin_all_reduce_by_backend, transport_of
from distman.errors import PlanMismatchError
from distman.manager import DistributedManager


@contextlib.contextmanager
def send_buffers(
    like: torch.Tensor, shapes: Mapping[int, Sequence[int]], group: Group
) -> Iterator[tuple[dict[int, torch.Tensor], Segment | None]]:
    """Lend tensors, by rank in the group, for what this rank is to send once, and the memory of some of them.

    What is computed into these is not copied again where ranks of this host read this rank's memory.
    """
    sizes = {rank: math.prod(shape) * like.itemsize for rank, shape in shapes.items()}
    with ClosedByErrors(group):
        segment = transport_of(group, like.device).segment(sizes)
    found: dict[int, torch.Tensor] = {}
    try:
        if segment is not None:
            found = {rank: segment.tensor(rank, like.dtype, shapes[rank]) for rank in segment.offsets}
        found |= {rank: new_empty(like, shape) for rank, shape in shapes.items() if rank not in found}
        yield found, segment
    finally:
        if segment is not None:
            segment.is_held = False


@collective
def exchange(
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
    group: Group,
    what: str = "",
    segment: Segment | None = None,
) -> None:
    """Send the i-th tensor to the i-th rank of the group, and fill the i-th receive with what that rank sent.

    Empty pieces do not travel. Receives may be strided. Messages of calls with another ``what`` do not meet.
    ``segment`` holds what is sent, if it was computed there.
    """

    def put_into_place(rank: int, piece: torch.Tensor) -> None:
        if piece is not receives[rank]:
            receives[rank].copy_(piece)

    _exchange(sends, receives, group, what, put_into_place, is_filled=True, segment=segment)


@collective
def exchange_and_add(sends: Sequence[torch.Tensor], group: Group, what: str, *, use_fp32: bool) -> torch.Tensor:
    mine = sends[group.rank]
    total = SumInRankOrder(mine, group.rank, use_fp32=use_fp32)
    _exchange(sends, [mine] * group.size, group, what, total.add, is_filled=False)
    return total.result()


def _exchange(
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
    group: Group,
    what: str,
    take: Callable[[int, torch.Tensor], None],
    *,
    is_filled: bool,
    segment: Segment | None = None,
) -> None:
    """Let ``take`` have each piece, which may be gone afterwards; ``is_filled``: it may be in its receive already."""
    transport = transport_of(group, receives[group.rank].device)

    def room_for(piece: torch.Tensor) -> torch.Tensor:
        if piece.device != transport.carrier:
            return torch.empty_like(piece, memory_format=torch.contiguous_format, device=transport.carrier)
        return piece if is_filled and piece.is_contiguous() else new_empty(piece, piece.shape)

    others = [(group.rank + step) % group.size for step in range(1, group.size)]
    to, origin = ({rank: pieces[rank] for rank in others if pieces[rank].numel()} for pieces in (sends, receives))
    _, tag = announce(group, what, ([piece.nbytes for piece in sends], [piece.nbytes for piece in receives]))
    with ClosedByErrors(group):
        batch = transport.begin(to, origin, room_for, tag, segment)
        if is_filled:
            take(group.rank, sends[group.rank])  # while the others travel
        for rank in sorted(origin):  # the order in which pieces are added up
            batch.take(rank, partial(take, rank))
        batch.finish()


def begin_sum(message: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Begin to add up the first messages of a call, and return what waits for the sum, maybe in the message."""
    call, _ = announce(group, "the first message")
    with ClosedByErrors(group):
        finish = _closing(group, transport_of(group, message.device).begin_sum(message))

    def finish_call() -> torch.Tensor:
        wait = current_wait()
        if wait is not None and wait.call is not call:  # another wait than the one that began it
            wait.call = dataclasses.replace(call, since=time.monotonic())
        return finish()

    return finish_call


def begin_all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Callable[[], torch.Tensor]:
    return _closing(group, begin_all_reduce_by_backend(tensor, op, group))


def _closing(group: Group, wait: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return what waits likewise, and closes the group by errors."""

    def finish() -> torch.Tensor:
        with ClosedByErrors(group):
            return wait()

    return finish


class ClosedByErrors:
    """Lets what ends a ``with`` block by an error close a group: what was sent would meet a later call.

    A backend may close its own connections then, but not the channels, in which others may wait for this rank.
    """

    __slots__ = ("_group",)

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            end_waits(self._group)


def announce(group: Group, what: str, pieces: tuple[Sequence[int], Sequence[int]] | None = None) -> tuple[Call, int]:
    """Let this thread be found waiting in a call of the group, and return the call and a number for its messages.

    Every member announces the same calls in the same order, with the same ``what``.
    """
    # Before the first message, so that none remains. A forward pass has asked already.
    check_all_run_here(group.ranks, "the backward pass of a collective")
    wait = current_wait()
    note = wait.note if wait is not None else ""
    text = f"{note or 'a backward pass'} {what}"
    call = Call(group, group.exchanges.last + 1, text, pieces)
    if call.number == 0:
        know(group)
    if wait is not None:
        wait.call = call
    next(group.exchanges)  # last: a rank that is asked about a call by then finds the wait in it
    return call, zlib.crc32(text.encode())


def layout_of(tensor: torch.Tensor, *free_dims: int) -> str:
    """Return dtype and shape of a tensor, a star for the dims in which the ranks' tensors may differ in length."""
    shape = ", ".join(["*" if dim in free_dims else str(length) for dim, length in enumerate(tensor.shape)])
    return f"{str(tensor.dtype).removeprefix('torch.')} ({shape})"


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
