"""Messages of a group's backend: gloo's, or those of NCCL and its like, which want all of an exchange at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import batch_isend_irecv, collects_batches
from distman.collectives._transport._segments import Segment

_TAGS = 2**31  # tags are not negative, and of 32 bits

Pieces = Mapping[int, torch.Tensor]  # by rank in the group
RoomFor = Callable[[torch.Tensor], torch.Tensor]


class Batch:
    """The messages of one exchange, all of them under way; ``rooms`` are contiguous, for the pieces of others."""

    def __init__(self, group: Group, carrier: torch.device, sends: Pieces, rooms: Pieces, tag: int) -> None:
        self._rooms, self._group, self._tag = rooms, group, tag
        operations = [self._operation(dist.irecv, room, rank) for rank, room in rooms.items()]
        self._sent = packed(sends, carrier)  # kept until it was
        operations += [self._operation(dist.isend, piece, rank) for rank, piece in self._sent.items()]
        self._works: Sequence[dist.Work] = batch_isend_irecv(operations) if operations else ()

    def _operation(self, operation: Callable[..., object], tensor: torch.Tensor, rank: int) -> dist.P2POp:
        """Return a message, whose tag differs from those of other lengths: gloo would end the process for one."""
        tag = (self._tag + tensor.nbytes) % _TAGS
        group = self._group
        return dist.P2POp(operation, carried(tensor), group.ranks[rank], process_group_of(group), tag)

    def take(self, rank: int, use: Callable[[torch.Tensor], None]) -> None:
        """Wait for the piece of a rank and hand it on; it may be gone when that returns."""
        Batch.finish(self)
        use(self._rooms[rank])

    def finish(self) -> None:
        """Wait until what this rank has sent is its own again."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()


class Transport:
    def __init__(self, group: Group, carrier: torch.device) -> None:
        self.group: Group = weakref.proxy(group)  # which holds this
        self.carrier = carrier  # the device from which they travel
        self._is_connected = False

    def begin(
        self,
        sends: Pieces,
        receives: Pieces,
        room_for: RoomFor,
        tag: int,
        segment: Segment | None = None,  # noqa: ARG002
    ) -> Batch:
        """Begin an exchange of these pieces, by rank in the group; messages of calls with another tag do not meet.

        ``receives`` are the like of those of others; ``room_for`` makes room for one, contiguous and on ``carrier``.
        Pieces to send may be in a segment already.
        """
        process_group, device = process_group_of(self.group), self.carrier
        if not self._is_connected and collects_batches(process_group, device):
            # All ranks take part in the first operation of a group, as NCCL and its like demand.
            dist.all_reduce(torch.zeros(1, device=device), group=process_group)
        self._is_connected = True
        rooms = {rank: room_for(piece) for rank, piece in receives.items()}
        return Batch(self.group, self.carrier, sends, rooms, tag)

    def segment(self, sizes: Mapping[int, int]) -> Segment | None:  # noqa: ARG002 - for a host's
        """Return room for pieces of such sizes in bytes that other ranks read, by rank; None where nobody does."""
        return None

    def begin_sum(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to add up a small message of each rank, which may become the sum; return what waits for that."""
        return begin_all_reduce(message, dist.ReduceOp.SUM, self.group)


def begin_all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Callable[[], torch.Tensor]:
    work = dist.all_reduce(tensor, op, group=process_group_of(group), async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        return tensor

    return finish


def carrier_of(device: torch.device, process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which tensors travel: the CPU over gloo, which cannot send those of a GPU."""
    if device.type == "cpu" or process_group is None or collects_batches(process_group, device):
        return device
    return torch.device("cpu")


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of a contiguous one, of a dtype that all backends send."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.int16:
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # the stride of one element may be any
    return tensor


def packed(pieces: Mapping[int, torch.Tensor], carrier: torch.device) -> dict[int, torch.Tensor]:
    """Return pieces as they travel; one that goes to several ranks is packed once."""
    once = {id(piece): piece for piece in pieces.values()}
    ready = {key: piece.resolve_conj().resolve_neg().contiguous().to(carrier) for key, piece in once.items()}
    return {rank: ready[id(piece)] for rank, piece in pieces.items()}
