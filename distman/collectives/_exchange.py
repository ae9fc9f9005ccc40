"""The one primitive under the collectives: every rank sends a piece to every other, straight into its place."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distman._coordination.monitor.mismatch import Call, end_waits
from distman._coordination.monitor.refusals import know
from distman._coordination.tracking import check_all_run_here, current_wait
from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman._host_channels import Channels, Work
from distman._torch_internals import all_gather_single, batch_isend_irecv, collects_batches, reduce_scatter_single
from distman.collectives._local_messages import agree, agreement_in
from distman.collectives._result_memory import new_empty
from distman.collectives._shared_memory import Apart, Outbox, SharedPieces, apart_in, pool_of, shared_with
from distman.collectives._sums import SumInRankOrder
from distman.errors import DistmanError, PlanMismatchError

_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
"""The types of devices of which a group's backend needs no first operation of all ranks any more."""
_MARK = b"mark"  # part of a tag
_SUM = 2**31  # tag of all signed sums: those of unlike calls meet, and tell the ranks apart
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
    may_share = can_share_memory(pg, carrier)
    to, origin = ([piece.nbytes for piece in pieces] for pieces in (sends, receives))
    if pg is not None and may_share:
        apart = apart_in(pg)
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
    call, tag = announce(group, what, (to, origin))
    channels = _channels(group, pg) if may_share else None
    messages = _Messages(group, pg, channels)
    _connect(receives[group.rank].device, pg)
    shared = None
    if shared_sends or shared_receives:
        shared = SharedPieces(shared_sends, shared_receives, group, apart, messages.about(tag), room_for, take, outbox)
    packed: dict[int, torch.Tensor] = {}
    try:
        for rank, buffer in buffers.items():
            messages.add(dist.irecv, buffer, rank, tag)
        for step in range(1, group.size):
            rank = (group.rank + step) % group.size
            if sends[rank].numel() and rank not in shared_sends:
                key = id(sends[rank])
                if key not in packed:
                    packed[key] = sends[rank].resolve_conj().resolve_neg().contiguous().to(carrier)
                messages.add(dist.isend, packed[key], rank, tag)
        for rank in range(group.size):
            messages.mark(rank, tag, sends=bool(sends[rank].numel()), receives=bool(receives[rank].numel()))
        works = messages.begin()
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
        if not is_known or shared is not None or channels is not None or collects_batches(pg, carrier):
            call.interrupt()
        raise
    for rank, buffer in buffers.items():
        take(rank, buffer)


def begin_sum(message: torch.Tensor, group: Group, what: str) -> Callable[[], torch.Tensor]:
    """Begin to add up small messages, and return what waits for their sum.

    Collective. What it returns is blocking.

    Args:
        message: Contiguous, of one length and dtype on all ranks, at most 16 KiB, which all channels take. It may
            become the sum.
        group: A group of several ranks.
        what: As of :func:`exchange`.
    """
    check_all_run_here(group.ranks, "the backward pass of a collective")
    announce(group, what)
    pg = process_group_of(group)
    channels = _channels(group, pg) if can_share_memory(pg, message.device) else None
    if channels is None or not channels.is_complete:
        return begin_all_reduce(message, dist.ReduceOp.SUM, group)
    others = [(group.rank + step) % group.size for step in range(1, group.size)]
    parts = {rank: torch.empty_like(message) for rank in others}
    with ClosedByErrors(group):
        works = [channels.receive(rank, _SUM, part) for rank, part in parts.items()]
        works += [channels.send(rank, _SUM, message) for rank in others]

    def finish() -> torch.Tensor:
        with ClosedByErrors(group):
            for work in works:
                work.wait()
        terms = [parts.get(rank, message) for rank in range(group.size)]
        total = terms[0] + terms[1]
        for term in terms[2:]:
            total += term
        return total

    return finish


def begin_all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Callable[[], torch.Tensor]:
    """Begin an all_reduce of the backend, in place, and return what waits for the result.

    Collective. What it returns is blocking.
    """
    work = dist.all_reduce(tensor, op, group=process_group_of(group), async_op=True)

    def finish() -> torch.Tensor:
        with ClosedByErrors(group):
            work.wait()
        return tensor

    return finish


def _channels(group: Group, process_group: dist.ProcessGroup | None) -> Channels | None:
    """Return the channels to other ranks of this host; None without."""
    if process_group is None:
        return None
    agreement = agreement_in(process_group)
    if agreement is None:
        with ClosedByErrors(group):
            agreement = agree(group, process_group)
    return agreement.channels


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
    all_gather_single(_carried(parts), _carried(mine), group=pg)
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
    reduce_scatter_single(_carried(mine), _carried(parts), group=pg)
    return mine


def announce(group: Group, what: str, pieces: tuple[Sequence[int], Sequence[int]] | None = None) -> tuple[Call, int]:
    """Let this thread be found waiting in a call of the group, and return the call and a number for its messages.

    Args:
        group: The group; every member announces the same calls in the same order.
        what: What must be equal on all of them, beside the operation and what it has noted of its arguments.
        pieces: As of ``Call``.
    """
    wait = current_wait()
    note = wait.note if wait is not None else ""
    text = f"{note or 'a backward pass'} {what}"
    call = Call(group, group.exchanges.last + 1, text, pieces)
    if call.number == 0:
        know(group)
    if wait is not None:
        wait.call = call
    next(group.exchanges)  # last: who is asked about a call by then finds the wait in it
    return call, zlib.crc32(text.encode())


def layout_of(tensor: torch.Tensor, *free_dims: int) -> str:
    """Return dtype and shape of a tensor, a star for the dims in which the ranks' tensors may differ in length."""
    shape = ", ".join(["*" if dim in free_dims else str(length) for dim, length in enumerate(tensor.shape)])
    return f"{str(tensor.dtype).removeprefix('torch.')} ({shape})"


class _Messages:
    """Messages of one exchange: small ones go through channels within the host, others over the backend.

    Args:
        group: The group.
        pg: What carries its collectives.
        channels: To other ranks of this host, by rank in the group; None where there are none.
    """

    def __init__(self, group: Group, pg: dist.ProcessGroup | None, channels: Channels | None) -> None:
        self._group, self._pg, self._channels = group, pg, channels
        self._operations: list[dist.P2POp] = []
        self._works: list[Work] = []

    def add(self, operation: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Add a message, which is under way if it goes through a channel."""
        work = self._start(operation, tensor, rank, tag)
        if work is not None:
            self._works.append(work)

    def _start(self, operation: Callable[..., Any], tensor: torch.Tensor, rank: int, tag: int) -> Work | None:
        """Start a message through a channel, or add it to the operations of the backend.

        Its tag differs from those of other calls and lengths: gloo would end the process for one.
        """
        tag = (tag + tensor.nbytes) % _TAGS
        channels = self._channels
        if channels is not None and tensor.nbytes <= channels.most_bytes and rank in channels:
            return (channels.send if operation is dist.isend else channels.receive)(rank, tag, tensor)
        self._operations.append(dist.P2POp(operation, _carried(tensor), self._group.ranks[rank], self._pg, tag))
        return None

    def mark(self, rank: int, tag: int, *, sends: bool, receives: bool) -> None:
        """Where messages go one way alone, through a channel, let who sends them wait until the reader is in the call.

        Over gloo it waits for its reader anyhow; else it would go on, whatever the other rank calls.
        """
        if sends != receives and self._channels is not None and rank in self._channels:
            mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self.add(dist.irecv if sends else dist.isend, mark, rank, zlib.crc32(_MARK, tag))

    def begin(self) -> list[Work]:
        """Start what was added to the operations of the backend, and return all that is under way."""
        operations, works = self._operations, self._works
        self._operations, self._works = [], []
        return [*works, *batch_isend_irecv(operations)] if operations else works

    def about(self, tag: int) -> Callable[[Callable[..., Any], torch.Tensor, int, str], Work]:
        """Return what begins a single message of a call, whose kind tells it from others of that call."""

        def post(operation: Callable[..., Any], tensor: torch.Tensor, rank: int, kind: str) -> Work:
            work = self._start(operation, tensor, rank, zlib.crc32(kind.encode(), tag))
            return work if work is not None else batch_isend_irecv([self._operations.pop()])[0]

        return post


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
    broadcast(message, src, group)
    found, *received = message.tolist()
    if found != sign:
        raise PlanMismatchError(
            f"rank {group.ranks[src]} must make the same call as this rank, got another one from there, and here: "
            f"{call.text}. DISTMAN_DEBUG=1 shows both."
        )
    return received[: len(numbers)]


def broadcast(tensor: torch.Tensor, src: int, group: Group) -> None:
    """Fill a tensor with what it holds on one rank of the group, by the backend.

    Collective. Blocking.
    """
    with ClosedByErrors(group):
        dist.broadcast(tensor, group=process_group_of(group), group_src=src)


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
