"""The one primitive under the collectives: every rank sends a piece to every other, straight into its place."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distman._coordination.monitor.mismatch import Call
from distman._coordination.tracking import check_all_run_here, current_wait
from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman._torch_internals import batch_isend_irecv, collects_batches
from distman.collectives._result_memory import new_empty
from distman.collectives._shared_memory import Apart, Outbox, SharedPieces, apart_in, pool_of, shared_with
from distman.collectives._sums import SumInRankOrder
from distman.errors import DistmanError, PlanMismatchError

_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
"""The types of devices of which a group's backend needs no first operation of all ranks any more."""
_TAGS = 2**31  # tags are not negative, and of 32 bits
_MAX_NUMBERS = 24  # broadcast by any call: then messages of calls that differ are of one length
_PART_BYTES = 2**24  # of a broadcast through memory: smaller parts cost more messages, larger ones more waiting


class SendBuffers:
    """Tensors for what this rank is to send once, by :func:`exchange`, within a ``with`` block.

    What is computed into them is not copied again where ranks of this host read this rank's memory.

    Args:
        like: A tensor of their dtype, on their device.
        shapes: Their shapes, by rank in the group, for other ranks.
        group: The group.

    Attributes:
        tensors: The tensors, by rank in the group; contiguous.
        outbox: Those that others read; None where there are none.
    """

    def __init__(self, like: torch.Tensor, shapes: Mapping[int, Sequence[int]], group: Group) -> None:
        pg = process_group_of(group)
        self.outbox: Outbox | None = None
        if pg is not None and like.device.type == "cpu" and can_share_memory(pg, like.device):
            sizes = [math.prod(shapes.get(rank, (0,))) * like.itemsize for rank in range(group.size)]
            shared = shared_with(group, sizes, apart_in(pg).to)
            readers = [rank for rank in shared if pool_of(group).serves(group.ranks[rank])]
            self.outbox = Outbox(group, {rank: (rank, sizes[rank]) for rank in readers}) if readers else None
        try:
            self.tensors = {rank: self._tensor(rank, like, shape) for rank, shape in shapes.items()}
        except BaseException:  # no memory, say
            self.__exit__()
            raise

    def _tensor(self, rank: int, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        shared = self.outbox.tensor(rank, like, shape) if self.outbox is not None else None
        return shared if shared is not None else new_empty(like, shape)

    def __enter__(self) -> SendBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.outbox is not None:
            self.outbox.let_go()


@collective
def exchange(
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
    group: Group,
    what: str = "",
    buffers: SendBuffers | None = None,
) -> None:
    """Send the i-th tensor to the i-th rank of the group, and fill the i-th receive with what that rank sent.

    Collective. Blocking. Empty pieces do not travel.

    Args:
        sends: One tensor for each rank of the group, this one included; never changed.
        receives: One tensor for each rank, of shape and dtype of what it sends; views of an output may be strided.
        group: The group.
        what: What must be equal on all ranks: messages of calls that differ do not meet.
        buffers: What holds all that is sent to others, if it was computed there.
    """

    def put_into_place(rank: int, piece: torch.Tensor) -> None:
        if piece is not receives[rank]:
            receives[rank].copy_(piece)

    outbox = buffers.outbox if buffers is not None else None
    _exchange(sends, receives, group, what, put_into_place, is_filled=True, outbox=outbox)


@collective
def exchange_and_add(sends: Sequence[torch.Tensor], group: Group, what: str, *, use_fp32: bool) -> torch.Tensor:
    """Return the sum of what the ranks send to this one, in rank order, as a new tensor.

    Collective. Blocking.

    Args:
        sends: As of :func:`exchange`; what all send to one rank is of one shape and dtype.
        group: The group.
        what: As of :func:`exchange`.
        use_fp32: Add 16-bit floats up in float32.
    """
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
    outbox: Outbox | None = None,
) -> None:
    """Exchange pieces, as :func:`exchange` and :func:`exchange_and_add` do.

    Args:
        sends: One tensor for each rank.
        receives: The like of what each rank sends.
        group: The group.
        what: What must be equal on all ranks.
        take: Called with each rank and its piece, which may be gone when that returns.
        is_filled: Whether pieces may arrive in ``receives`` itself, this rank's among them.
        outbox: Where pieces for ranks of this host are already.
    """
    # Before the first message, so that none is left behind. A forward pass has asked already.
    check_all_run_here(group.ranks, "the backward pass of a collective")
    pg = process_group_of(group)
    carrier = carrier_of(receives[group.rank].device, pg)
    apart, shared_sends, shared_receives = Apart(), {}, {}
    if pg is not None and can_share_memory(pg, carrier):
        apart = apart_in(pg)
        to, origin = ([piece.nbytes for piece in pieces] for pieces in (sends, receives))
        shared_sends = {rank: sends[rank] for rank in shared_with(group, to, apart.to)}
        shared_receives = {rank: receives[rank] for rank in shared_with(group, origin, apart.origin)}

    def room_for(piece: torch.Tensor) -> torch.Tensor:
        if is_filled and piece.is_contiguous() and piece.device == carrier:
            return piece
        return new_empty(piece, piece.shape) if piece.device == carrier else _contiguous_like(piece, carrier)

    buffers = {
        rank: room_for(piece)
        for rank, piece in enumerate(receives)
        if rank != group.rank and piece.numel() and rank not in shared_receives
    }
    call, tag = announce(group, what)
    operations = [_message(dist.irecv, buffer, rank, group, pg, tag) for rank, buffer in buffers.items()]
    packed: dict[int, torch.Tensor] = {}

    def post(operation: Callable[..., Any], tensor: torch.Tensor, rank: int, kind: str) -> dist.Work:
        return batch_isend_irecv([_message(operation, tensor, rank, group, pg, zlib.crc32(kind.encode(), tag))])[0]

    for step in range(1, group.size):
        rank = (group.rank + step) % group.size
        if sends[rank].numel() and rank not in shared_sends:
            key = id(sends[rank])
            if key not in packed:
                packed[key] = sends[rank].resolve_conj().resolve_neg().contiguous().to(carrier)
            operations.append(_message(dist.isend, packed[key], rank, group, pg, tag))
    _connect(receives[group.rank].device, pg)
    is_shared = bool(shared_sends or shared_receives)
    shared = None
    if is_shared:
        shared = SharedPieces(shared_sends, shared_receives, group, apart, post, room_for, take, outbox)
    try:
        works = batch_isend_irecv(operations) if operations else ()
        if shared is not None:
            shared.start()
        if is_filled:
            take(group.rank, sends[group.rank])  # while the others travel
        if shared is not None:
            shared.wait()
        for work in works:
            work.wait()
    except BaseException as error:
        is_known = isinstance(error, RuntimeError) and not isinstance(error, DistmanError)  # to gloo, which closes
        # A part of a batch may be under way, as when memory ran out; so may a piece without its header.
        if not is_known or shared is not None or collects_batches(pg, carrier):
            call.interrupt()
        raise
    for rank, buffer in buffers.items():
        take(rank, buffer)


@collective
def gather_evenly(tensor: torch.Tensor, full: torch.Tensor, dim: int, group: Group, what: str) -> bool:
    """Put the tensors of all ranks together along a dim; return False where :func:`exchange` is to do it.

    Collective. Blocking. It is one operation of the backend, and faster than messages on GPUs.

    Args:
        tensor: The tensor, of one shape and dtype on all ranks; never changed.
        full: Contiguous; becomes the full tensor.
        dim: The dim.
        group: The group.
        what: As for :func:`exchange`.
    """
    pg = process_group_of(group)
    if pg is None or not tensor.numel() or not collects_batches(pg, tensor.device):
        return False
    check_all_run_here(group.ranks, "the backward pass of a collective")
    announce(group, what)
    mine = tensor.resolve_conj().resolve_neg().contiguous()
    parts = full if dim == 0 else mine.new_empty(group.size, *mine.shape)
    dist.all_gather_single(_carried(parts), _carried(mine), group=pg)
    if dim != 0:
        full.unflatten(dim, (group.size, -1)).copy_(parts.movedim(0, dim))
    return True


@collective
def reduce_evenly(tensor: torch.Tensor, dim: int, group: Group, what: str) -> torch.Tensor | None:
    """Return this rank's slice of the sum of the ranks' tensors; None where :func:`exchange` is to move them.

    Collective. Blocking. As :func:`gather_evenly`.

    Args:
        tensor: The tensor, of one shape and dtype on all ranks; never changed.
        dim: Dim to split, of a length that the ranks divide.
        group: The group.
        what: As for :func:`exchange`.
    """
    pg = process_group_of(group)
    is_summed = tensor.dtype not in (torch.int16, torch.bool)  # by no backend
    if pg is None or not is_summed or not tensor.numel() or not collects_batches(pg, tensor.device):
        return None
    check_all_run_here(group.ranks, "the backward pass of a collective")
    announce(group, what)
    parts = torch.stack(tensor.resolve_conj().resolve_neg().chunk(group.size, dim)).contiguous()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_single(_carried(mine), _carried(parts), group=pg)
    return mine


def announce(group: Group, what: str) -> tuple[Call, int]:
    """Let this thread be found waiting in a call of the group, and return the call and a number for its messages.

    Args:
        group: The group; every member announces the same calls in the same order.
        what: What must be equal on all of them, beside the operation and what it has noted of its arguments.
    """
    wait = current_wait()
    note = wait.note if wait is not None else ""
    text = f"{note or 'a backward pass'} {what}"
    call = Call(group, next(group.exchanges), text)
    if wait is not None:
        wait.call = call
    return call, zlib.crc32(text.encode())


def layout_of(tensor: torch.Tensor, *free_dims: int) -> str:
    """Return dtype and shape of a tensor, a star for the dims in which the ranks' tensors may differ in length."""
    shape = ", ".join(["*" if dim in free_dims else str(length) for dim, length in enumerate(tensor.shape)])
    return f"{str(tensor.dtype).removeprefix('torch.')} ({shape})"


def _message(
    operation: Callable[..., Any], piece: torch.Tensor, rank: int, group: Group, pg: dist.ProcessGroup | None, tag: int
) -> dist.P2POp:
    """Return a message whose tag differs from those of other calls and lengths: gloo would end the process for one."""
    tag = (tag + piece.numel() * piece.itemsize) % _TAGS
    return dist.P2POp(operation, _carried(piece), group.ranks[rank], pg, tag)


def can_share_memory(process_group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether tensors of a device may go from rank to rank of a host through memory."""
    return device.type == "cpu" and not collects_batches(process_group, device)


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


def carrier_of(device: torch.device, process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which tensors travel: the CPU over gloo, which cannot send those of a GPU."""
    if device.type == "cpu" or process_group is None or collects_batches(process_group, device):
        return device
    return torch.device("cpu")


def _contiguous_like(piece: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(piece, memory_format=torch.contiguous_format, device=device)


def _connect(device: torch.device, process_group: dist.ProcessGroup | None) -> None:
    """Let all ranks of a group take part in its first operation, as NCCL and its like demand; later ones need not."""
    if process_group is None or device.type in _connected.get(process_group, ()):
        return
    if collects_batches(process_group, device):
        dist.all_reduce(torch.zeros(1, device=device), group=process_group)
    _connected.setdefault(process_group, set()).add(device.type)


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
    full = mine.new_empty(group.size, len(numbers))
    exchange([mine] * group.size, full.unbind(), group, f"{len(numbers)} numbers")
    rows: list[list[int]] = full.tolist()
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
    call, sign = announce(group, f"from group rank {src}")
    numbers = list(numbers) if group.rank == src else [0] * len(numbers)
    message = torch.tensor([sign, *numbers, *[0] * (_MAX_NUMBERS - len(numbers))], dtype=torch.int64, device=device)
    dist.broadcast(message, group=process_group_of(group), group_src=src)
    found, *received = message.tolist()
    if found != sign:
        raise PlanMismatchError(
            f"rank {group.ranks[src]} must make the same call as this rank, got another one from there, and here: "
            f"{call.text}. DISTMAN_DEBUG=1 shows both."
        )
    return received[: len(numbers)]


@collective
def broadcast_parts(tensor: torch.Tensor, src: int, group: Group) -> None:
    """Fill a tensor with what it holds on one rank of the group, which writes one part while the others read another.

    Collective. Blocking.

    Args:
        tensor: On the CPU, with one dim, of one length and dtype on all ranks.
        src: Rank in the group.
        group: The group.
    """
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


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of a contiguous one, of a dtype that all backends send."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(-1).view(torch.uint8) if tensor.dtype == torch.int16 else tensor
