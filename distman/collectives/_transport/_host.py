"""Messages between ranks of one host: small pieces in their sockets, large ones in memory that both map.

Ranks of other hosts, and those that could not connect, are reached by the backend.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Set
from functools import partial

import numpy as np
import torch

from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import close_with
from distman.collectives._sums import SumInRankOrder
from distman.collectives._transport import _segments
from distman.collectives._transport._backend import Batch, Pieces, RoomFor, Transport, packed
from distman.collectives._transport._connections import IN_SEGMENT, PIECE, WAS_READ, Connections, Frame, Message
from distman.collectives._transport._meeting import Meeting
from distman.collectives._transport._segments import Segment, Segments, as_tensor

_MARK = b"mark"  # part of a tag
_SUM = 2**31 - 1  # tag of all signed sums: those of unlike calls meet, and tell the ranks apart


class HostTransport(Transport):
    """Carries the messages of a group to ranks of this host; a wait may take ``timeout`` seconds."""

    def __init__(self, group: Group, carrier: torch.device, timeout: float) -> None:
        super().__init__(group, carrier)
        self.segments = Segments()
        self._timeout = timeout
        self._connections: Connections | None = None
        self._carries_sums = False
        self._meeting = threading.Lock()

    def connections(self) -> Connections:
        """Return the connections to other ranks, which all ranks of the host make at their first exchange."""
        if self._connections is None:
            with self._meeting:
                return self._connections or self._connect()
        return self._connections

    def _connect(self) -> Connections:
        meeting, process_group = Meeting(self.group), process_group_of(self.group)
        made = Connections(meeting.sockets, self.segments, self._timeout)
        if process_group is not None:
            close_with(process_group, made.close)
        self._carries_sums, self._connections = meeting.all_listen, made
        return made

    def begin(
        self, sends: Pieces, receives: Pieces, room_for: RoomFor, tag: int, segment: Segment | None = None
    ) -> HostBatch:
        return HostBatch(self, sends, receives, room_for, tag, segment)

    def segment(self, sizes: Mapping[int, int]) -> Segment | None:
        ranks, here = self.group.ranks, self.group.neighbours
        large = {rank: (rank, size) for rank, size in sizes.items() if is_large(size) and ranks[rank] in here}
        return self.take(large) if large and _segments.is_wanted() else None

    def take(self, pieces: Mapping[int, tuple[int, int]]) -> Segment | None:
        if self._connections is not None:
            self._connections.look(self.segments.readers())
        return self.segments.take(pieces)

    def begin_sum(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        connections, group = self.connections(), self.group
        if not self._carries_sums:
            return super().begin_sum(message)
        others = {(group.rank + step) % group.size: message for step in range(1, group.size)}
        batch = self.begin(others, others, torch.empty_like, _SUM)
        connections.flush_later()

        def finish() -> torch.Tensor:
            total = SumInRankOrder(message, group.rank)
            for rank in sorted(others):
                batch.take(rank, partial(total.add, rank))
            return total.result()

        return finish


class HostBatch(Batch):
    """The messages of one exchange; arguments as of ``Transport.begin``."""

    def __init__(
        self, host: HostTransport, sends: Pieces, receives: Pieces, room_for: RoomFor, tag: int, segment: Segment | None
    ) -> None:
        self._host, self._receives, self._segment = host, receives, segment
        self._connections = connections = host.connections()
        near = connections.links.keys()
        large = {rank for rank, like in receives.items() if rank in near and is_large(like.nbytes)}
        rooms = {rank: room_for(like) for rank, like in receives.items() if rank not in large}  # those may need none
        self._incoming = {
            rank: connections.ask(rank, tag, like.nbytes, as_bytes(rooms[rank]) if rank in rooms else None)
            for rank, like in receives.items()
            if rank in near
        }
        far_sends, far_rooms = ({rank: ones[rank] for rank in ones.keys() - near} for ones in (sends, rooms))
        super().__init__(host.group, host.carrier, far_sends, far_rooms, tag)
        self._rooms = rooms
        self._messages: list[tuple[int, Message]] = []
        self._send({rank: piece for rank, piece in sends.items() if rank in near})
        self._mark(sends.keys() & near, receives.keys() & near)

    def _send(self, pieces: Pieces) -> None:
        large = {rank: piece for rank, piece in pieces.items() if is_large(piece.nbytes)}
        shared = self._share(large) if large else {}
        for rank, piece in packed(
            {rank: one for rank, one in pieces.items() if rank not in shared}, self._host.carrier
        ).items():
            self._post(rank, Frame(PIECE, tag=self._tag, size=piece.nbytes), as_bytes(piece))

    def _share(self, pieces: Pieces) -> Pieces:
        """Send pieces through shared memory, and return those that were sent: none if no memory could be had."""
        segment = self._segment or self._filled(pieces)
        if segment is None:
            return {}
        for rank, piece in pieces.items():
            frame = Frame(IN_SEGMENT, segment.slot, self._tag, piece.nbytes, segment.offsets[rank])
            self._post(rank, frame, None, segment)
        if segment is not self._segment:
            segment.is_held = False
        return pieces

    def _filled(self, pieces: Pieces) -> Segment | None:
        segment = self._host.take({rank: (id(piece), piece.nbytes) for rank, piece in pieces.items()})
        if segment is not None:
            for rank in {segment.offsets[rank]: rank for rank in pieces}.values():  # one for each place
                segment.tensor(rank, pieces[rank].dtype, pieces[rank].shape).copy_(pieces[rank].detach())
        return segment

    def _post(self, rank: int, frame: Frame, data: memoryview | None, segment: Segment | None = None) -> None:
        self._messages.append((rank, self._connections.send(rank, frame, data, segment)))

    def _mark(self, readers: Set[int], senders: Set[int]) -> None:
        """Where messages go one way alone, let the rank that sends them wait until the reader is in the call.

        Over gloo it waits for its reader anyhow; else it would go on, whatever the other rank calls.
        """
        tag = zlib.crc32(_MARK, self._tag)
        for rank in senders - readers:
            self._post(rank, Frame(PIECE, tag=tag, size=len(_MARK)), memoryview(_MARK))
        for rank in readers - senders:
            self._messages.append((rank, self._connections.ask(rank, tag, len(_MARK), None)))

    def take(self, rank: int, use: Callable[[torch.Tensor], None]) -> None:
        message = self._incoming.get(rank)
        if message is None:
            super().take(rank, use)
            return
        self._connections.wait(rank, message)
        like = self._receives[rank]
        use(self._rooms[rank] if message.memory is None else as_tensor(message.memory, like.dtype, like.shape))
        if message.slot is not None:
            self._connections.send(rank, Frame(WAS_READ, message.slot))

    def finish(self) -> None:
        for rank, message in self._messages:
            self._connections.wait(rank, message)
        super().finish()
        self._connections.flush_later()


def is_large(num_bytes: int) -> bool:
    return num_bytes >= _segments.THRESHOLD


def as_bytes(tensor: torch.Tensor) -> memoryview:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # which NumPy lacks
        tensor = tensor.view(torch.int16)
    return tensor.numpy().reshape(-1).view(np.uint8).data
