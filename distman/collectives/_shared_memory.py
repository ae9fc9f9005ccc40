"""The pieces of an exchange between ranks of one host: through memory that both map, instead of a socket.

A rank writes its pieces into a segment of its own and sends a header, which says where each lies. A receiver maps a
segment when a header names it for the first time, and answers whether it could; if not, the piece follows as a message.
A receiver that has read a piece says so in the segment, which is written to again when all its readers have. Nobody
waits for that: where no segment is free, the piece is a message. So all waits are those for messages.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from distman._groups.hosts import Neighbours
from distman._groups.registry import Group
from distman._host_channels import Work, map_memory
from distman._host_memory import CAN_BE_MADE, make_memory, opened_memory
from distman._log import logger

VARIABLE = "DISTMAN_SHARED_MEMORY"
THRESHOLD = 2**20
"""Size in bytes of the smallest piece that goes this way: at 1 MB it takes 1.4 of the time of a message in a channel
on 2 ranks, and 0.5 on 4, where one copy serves three readers; at 512 kB it is behind."""
_MOST_BYTES = 2**28  # that a rank keeps for as long as the job: two exchanges under way, of 128 MB each
_LEAST_BYTES = 2**20  # of a segment, so that exchanges of sizes that vary a little share it
_MOST_SEGMENTS = 8  # each is one open file
_PAGE = 4096  # bytes before the pieces: the nonce, and a number of each reader
_ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of any dtype
_NAME = "distman-exchange"
_NONCE_BITS = 62

_AS_MESSAGE, _AS_KNOWN, _AS_NEW, _NEVER = range(4)
"""What a header says: the piece follows; it lies in a segment that the reader has mapped; it has to map it; the piece
follows, and so will all later ones of this group, without a header."""


class _Place(NamedTuple):
    """Where a piece lies: what a header says, in as many numbers.

    Attributes:
        way: One of the four above.
        pid: The process whose segment it is.
        descriptor: The segment's file descriptor there.
        size: Its size in bytes.
        nonce: What stands at its beginning.
        place: Its place in the pool.
        offset: Where in it the piece begins, in bytes.
        slot: Where the reader says that it has read.
        use: What it writes there.
    """

    way: int
    pid: int = 0
    descriptor: int = 0
    size: int = 0
    nonce: int = 0
    place: int = 0
    offset: int = 0
    slot: int = 0
    use: int = 0


@dataclass(eq=False)
class _Segment:
    """Memory that this rank writes to and others read.

    Attributes:
        index: Its place in the pool; a reader that maps another one of that index lets go of this one.
        size: Bytes for pieces.
        descriptor: Its file descriptor, by which readers find it.
        memory: All of it.
        nonce: Tells it from other files that a reader may find.
        slots: Where each reader writes the number of the last use that it has read, by rank in the world.
        known_to: The ranks that have mapped it.
        use: Number of the last use.
        readers: The ranks that read in that use.
    """

    index: int
    size: int
    descriptor: int
    memory: torch.Tensor
    nonce: int
    slots: dict[int, int] = field(default_factory=dict)
    known_to: set[int] = field(default_factory=set)
    use: int = 0
    readers: set[int] = field(default_factory=set)

    @classmethod
    def create(cls, index: int, size: int) -> _Segment:
        descriptor = make_memory(_NAME, _PAGE + size)
        try:
            memory = map_memory(descriptor, _PAGE + size)
        except BaseException:
            os.close(descriptor)
            raise
        nonce = secrets.randbits(_NONCE_BITS)
        _numbers(memory)[0] = nonce
        segment = cls(index, size, descriptor, memory, nonce)
        weakref.finalize(segment, os.close, descriptor)
        return segment

    def place(self, rank: int, offset: int) -> _Place:
        """Return what a header tells a reader."""
        way = _AS_KNOWN if rank in self.known_to else _AS_NEW
        where = (os.getpid(), self.descriptor, _PAGE + self.size, self.nonce, self.index, offset)
        return _Place(way, *where, self.slots[rank], self.use)

    @property
    def is_free(self) -> bool:
        numbers = _numbers(self.memory)
        return all(int(numbers[self.slots[rank]]) == self.use for rank in self.readers)


class Pool:
    """The segments of this rank, and those of others that it has mapped, for the length of a job."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self._segments: dict[int, _Segment] = {}
        self._mapped: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self.can_grow = CAN_BE_MADE
        self._lock = threading.Lock()

    def take(self, num_bytes: int, readers: set[int]) -> _Segment | None:
        """Return a segment that nobody reads, for pieces to these ranks; None where there is none."""
        with self._lock:
            segment = self._find(num_bytes)
            if segment is None or len(segment.slots.keys() | readers) >= _PAGE // 8:
                return None
            segment.use += 1
            segment.readers = set(readers)
            for rank in readers:
                segment.slots.setdefault(rank, len(segment.slots) + 1)
            return segment

    def read(self, sender: int, where: _Place, like: torch.Tensor, take: Callable[[torch.Tensor], None]) -> bool:
        """Take a piece out of a segment of another rank, and say there that it was read; return whether it could be."""
        memory = self._memory_of(sender, where)
        if memory is None:
            return False
        take(_piece(memory, where.offset, like))
        # Another processor must not see the number before all was read. To let go of a lock and to take it is a full
        # barrier, on ARM too; the sender writes after it has seen the number, which no processor turns round.
        with self._lock:
            pass
        with self._lock:
            _numbers(memory)[where.slot] = where.use
        return True

    def _memory_of(self, sender: int, where: _Place) -> torch.Tensor | None:
        with self._lock:
            nonce, memory = self._mapped.get((sender, where.place), (0, None))
            if nonce != where.nonce:
                self._mapped.pop((sender, where.place), None)
                memory = _open(where)
                if memory is not None:
                    self._mapped[sender, where.place] = where.nonce, memory
            return memory

    def serves(self, rank: int) -> bool:
        """Return whether a rank may be sent pieces through memory."""
        return rank not in self.refused and is_wanted()

    def refuse(self, rank: int) -> None:
        """Send a rank nothing but messages from now on."""
        with self._lock:
            if not self.refused:
                logger.info("rank %d cannot map this rank's memory: its pieces travel over a socket", rank)
            self.refused.add(rank)

    def give_up(self, error: Exception) -> None:
        """Ask the system for no more memory, after it had none."""
        self.can_grow = False
        logger.warning("ranks of this host exchange over sockets: no shared memory: %s", error)

    @property
    def _num_bytes(self) -> int:
        return sum(one.size for one in self._segments.values())

    def _find(self, num_bytes: int) -> _Segment | None:
        free = sorted((one for one in self._segments.values() if one.is_free), key=lambda one: one.size)
        fitting = next((one for one in free if one.size >= num_bytes), None)
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        if fitting is not None or size > _MOST_BYTES or not self.can_grow:
            return fitting
        while free and (len(self._segments) == _MOST_SEGMENTS or self._num_bytes + size > _MOST_BYTES):
            del self._segments[free.pop(0).index]
        if len(self._segments) == _MOST_SEGMENTS or self._num_bytes + size > _MOST_BYTES:
            return None
        index = next(index for index in range(_MOST_SEGMENTS) if index not in self._segments)
        try:
            self._segments[index] = _Segment.create(index, size)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's for a mapping that fails
            self.give_up(error)
        return self._segments.get(index)


@dataclass
class Apart:
    """The ranks of a process group, by rank in it, whose pieces are messages, though they are of this host.

    Attributes:
        to: Those to which this rank has said so.
        origin: Those that have said so to this rank.
    """

    to: set[int] = field(default_factory=set)
    origin: set[int] = field(default_factory=set)


class Outbox:
    """Room in a segment for pieces that other ranks are to read.

    Args:
        group: The group.
        pieces: What each rank is to read, by rank in the group: a number, alike where it is the same piece, and its
            size in bytes.

    Attributes:
        segment: The segment; None where there was none to be had.
        offsets: Where in it the piece for each rank begins; none without it.
        is_told: Whether a rank was told of it, and may read.
    """

    def __init__(self, group: Group, pieces: Mapping[int, tuple[int, int]]) -> None:
        self.is_told = False
        starts: dict[int, int] = {}  # a tensor for several ranks is written once
        end = 0
        for number, num_bytes in pieces.values():
            if number not in starts:
                starts[number] = end
                end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.segment = pool_of(group).take(end, {group.ranks[rank] for rank in pieces}) if end else None
        self.offsets = {rank: starts[number] for rank, (number, _) in pieces.items()} if self.segment else {}

    def tensor(self, rank: int, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
        """Return the memory of the piece for a rank as a tensor; None where it has none."""
        if self.segment is None or rank not in self.offsets:
            return None
        start = _PAGE + self.offsets[rank]
        end = start + math.prod(shape) * like.itemsize
        return self.segment.memory[start:end].view(like.dtype).view(torch.Size(shape))

    def let_go(self) -> None:
        """Let the segment be taken again, if nobody has been told to read it."""
        if self.segment is not None and not self.is_told:
            self.segment.readers = set()


class SharedPieces:
    """The pieces of one exchange that go through memory.

    Args:
        sends: The pieces for other ranks of this host, by rank in the group.
        receives: The like of those of other ranks.
        group: The group.
        apart: Those who do without, from the next exchange on.
        post: Starts a message: the operation, a tensor, the rank, and what tells it from other messages.
        room_for: Makes room for a message like a tensor.
        take: Called with the rank and its piece, which may be gone when that returns.
        outbox: Where pieces to send are already; None where all have to be copied.
    """

    def __init__(
        self,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        group: Group,
        apart: Apart,
        post: Callable[[Callable[..., object], torch.Tensor, int, str], Work],
        room_for: Callable[[torch.Tensor], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
        outbox: Outbox | None,
    ) -> None:
        self._sends, self._receives, self._group, self._apart, self._post = sends, receives, group, apart, post
        self._room_for, self._take, self._outbox = room_for, take, outbox
        self._pool = pool_of(group)
        self._headers = {rank: _header() for rank in receives}
        self._arriving: dict[int, Work] = {}
        self._works: list[Work] = []
        self._answers: dict[int, tuple[torch.Tensor, Work]] = {}
        self._messages: dict[int, tuple[torch.Tensor, Work]] = {}
        self._segment: _Segment | None = None

    def start(self) -> None:
        """Write what this rank sends, and say where it is."""
        for rank, header in self._headers.items():
            self._arriving[rank] = self._post_about(dist.irecv, header, rank, self._receives)
        self._write()

    def wait(self) -> None:
        """Take what others have sent, and see that they have got what this rank has.

        No rank waits for a piece as long as another may wait for its answer.
        """
        for rank in sorted(self._arriving):  # the order in which pieces are added up
            self._arriving[rank].wait()
            self._receive(rank, _Place(*self._headers[rank].tolist()))
        for rank, (answer, work) in self._answers.items():
            work.wait()
            self._conclude(rank, is_mapped=bool(answer.item()))
        for rank, (message, work) in self._messages.items():
            work.wait()
            self._take(rank, message)
        for work in self._works:
            work.wait()

    def _write(self) -> None:
        pool, ranks = self._pool, self._group.ranks
        pieces = {
            rank: (id(piece), _num_bytes(piece)) for rank, piece in self._sends.items() if pool.serves(ranks[rank])
        }
        outbox = self._outbox
        if outbox is None or outbox.segment is None:  # there may be one by now
            outbox = Outbox(self._group, pieces)
        segment = self._segment = outbox.segment
        if segment is not None:  # another exchange may have found since that a rank does without
            segment.readers = {ranks[rank] for rank in self._sends if rank in outbox.offsets}
        written: set[int] = set()
        for rank, piece in self._sends.items():
            memory = outbox.tensor(rank, piece, piece.shape)
            if segment is None or memory is None:
                if rank not in pieces:
                    self._apart.to.add(rank)
                self._send_header(rank, _Place(_AS_MESSAGE if rank in pieces else _NEVER))
                self._send_piece(rank, piece)
                continue
            offset = outbox.offsets[rank]
            if outbox is not self._outbox and offset not in written:
                memory.copy_(piece.detach())
                written.add(offset)
            outbox.is_told = True
            self._send_header(rank, segment.place(ranks[rank], offset))

    def _send_header(self, rank: int, where: _Place) -> None:
        header = torch.tensor(where, dtype=torch.int64, device="cpu")
        self._works.append(self._post_about(dist.isend, header, rank, self._sends))
        if where.way == _AS_NEW:
            answer = torch.zeros(1, dtype=torch.int64, device="cpu")
            self._answers[rank] = answer, self._post_about(dist.irecv, answer, rank, self._sends, "answer")

    def _receive(self, rank: int, where: _Place) -> None:
        like = self._receives[rank]
        is_open = where.way == _AS_KNOWN or (where.way == _AS_NEW and is_wanted())
        is_read = is_open and self._pool.read(self._group.ranks[rank], where, like, partial(self._take, rank))
        if where.way == _AS_NEW:
            answer = torch.tensor([is_read], dtype=torch.int64, device="cpu")
            self._works.append(self._post_about(dist.isend, answer, rank, self._receives, "answer"))
        if where.way == _NEVER:
            self._apart.origin.add(rank)
        if not is_read:
            message = self._room_for(like)
            self._messages[rank] = message, self._post_about(dist.irecv, message, rank, self._receives, "piece")

    def _conclude(self, rank: int, *, is_mapped: bool) -> None:
        """Send a piece after all to a rank that cannot map the segment, and spare it the question from now on."""
        member, segment = self._group.ranks[rank], self._segment
        if segment is None:
            return
        if is_mapped:
            segment.known_to.add(member)
            return
        segment.readers = segment.readers - {member}  # another thread may be going through them
        self._pool.refuse(member)
        self._send_piece(rank, self._sends[rank].clone())  # it may lie in the segment, which is free from now on

    def _send_piece(self, rank: int, piece: torch.Tensor) -> None:
        piece = piece.detach().resolve_conj().resolve_neg().contiguous().cpu()
        self._works.append(self._post_about(dist.isend, piece, rank, self._sends, "piece"))

    def _post_about(
        self,
        operation: Callable[..., object],
        tensor: torch.Tensor,
        rank: int,
        pieces: Mapping[int, torch.Tensor],
        what: str = "header",
    ) -> Work:
        return self._post(operation, tensor, rank, f"{what} of {_num_bytes(pieces[rank])} bytes")


_pools: weakref.WeakKeyDictionary[Neighbours, Pool] = weakref.WeakKeyDictionary()
"""The segments of a job."""
_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, Apart] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def pool_of(group: Group) -> Pool:
    with _MAKING:
        return _pools.setdefault(group.neighbours, Pool())


def apart_in(process_group: dist.ProcessGroup) -> Apart:
    """Return which members of a process group do without."""
    with _MAKING:
        return _apart.setdefault(process_group, Apart())


def shared_with(group: Group, sizes: Sequence[int], apart: set[int]) -> list[int]:
    """Return the other ranks, in the group, whose pieces go through memory: both sides find the same.

    Args:
        group: The group.
        sizes: The size in bytes of the piece to or from each rank of the group.
        apart: Those who do without.
    """
    if max(sizes) < THRESHOLD:
        return []
    here = group.neighbours.ranks
    others = [(group.rank + step) % group.size for step in range(1, group.size)]
    return [rank for rank in others if sizes[rank] >= THRESHOLD and group.ranks[rank] in here and rank not in apart]


def reaches_all(group: Group) -> bool:
    """Return whether all ranks of a group are of this host, and this rank knows of nothing against memory."""
    here, pool = group.neighbours.ranks, pool_of(group)
    return is_wanted() and here.issuperset(group.ranks) and pool.can_grow and pool.refused.isdisjoint(group.ranks)


def is_wanted() -> bool:
    """Return whether this rank may use shared memory; the others ask it."""
    return os.environ.get(VARIABLE, "1") != "0"


def _header() -> torch.Tensor:
    return torch.zeros(len(_Place._fields), dtype=torch.int64, device="cpu")


def _num_bytes(piece: torch.Tensor) -> int:
    return piece.numel() * piece.itemsize


def _numbers(memory: torch.Tensor) -> torch.Tensor:
    return memory[:_PAGE].view(torch.int64)


def _piece(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    start = _PAGE + offset
    return memory[start : start + _num_bytes(like)].view(like.dtype).view(like.shape)


def _open(where: _Place) -> torch.Tensor | None:
    """Map the segment of another process; None where this one may not, or where its number means another process."""
    try:
        with opened_memory(_NAME, where.size, where.pid, where.descriptor) as descriptor:
            memory = map_memory(descriptor, where.size)
    except (OSError, RuntimeError):  # RuntimeError: torch's for a mapping that fails
        return None
    return memory if int(_numbers(memory)[0]) == where.nonce else None
