"""Small messages between processes of one host: each writes into memory of its own, and rings the reader's bell.

The bell is a word on which its owner waits, by the futex call of Linux: messages arrive within microseconds, where a
socket takes a tenth of a millisecond. A writer that leaves says so in its memory; one has died where no process of its
number is there that started when it did.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from distman._host_memory import CAN_BE_MADE, make_memory, opened_memory

_ROOM, _LEAST_ROOM, _MOST_ROOM = 2**24, 2**15, 2**21
"""Bytes for messages that a process has for all others, that it has for each at least, and at most. Only what is used
takes memory, and what is read is used again first."""
_PAGE = 4096  # bytes before the channels: what concerns all readers
_SLOTS = 64  # messages that may wait in one channel
_SLOT = 32  # bytes of each: its size, its tag and where it begins
_HEAD = 128 + _SLOTS * _SLOT  # bytes before the messages: two counts, on cache lines of their own, and the slots
_ALIGNMENT = 64  # bytes: a cache line
_NONCE, _CLOSED, _BELL = 0, 8, 16  # words of 8 bytes, by the byte where they begin
_WRITTEN, _BLOCKED, _READ, _FIRST_SLOT = 0, 8, 64, 128
"""In a channel: how many messages were ever written; whether more wait for room; how many were read."""
_NAME = "distman-channels"
_NONCE_BITS = 62
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the call, from the kernel's tables; None where it is not known."""
_WAIT, _WAKE = 0, 1  # from linux/futex.h; across processes
_EVERYBODY = 2**31 - 1
_SPINS = 30  # looks before it sleeps, each of which gives the core away: a reply takes some tens of microseconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.3  # seconds between two looks whether the other process is alive, doubled
_BELL_NUMBERS = 2**20  # of one process, and of none but it: what is written differs from what was there

_LIBC = ctypes.CDLL(None)
CAN_BE_USED = CAN_BE_MADE and _FUTEX is not None
"""Whether this system has what channels need."""


_Key: TypeAlias = tuple[int, int]
"""What tells messages apart: tag, and size in bytes."""
T = TypeVar("T")


class Introduction(NamedTuple):
    """What another process needs to know to open this one's memory.

    Attributes:
        pid: The process; 0 where it does without.
        started: When it started, in the kernel's ticks.
        descriptor: The memory's file descriptor there.
        size: Its size in bytes.
        nonce: What stands at its beginning.
    """

    pid: int = 0
    started: int = 0
    descriptor: int = 0
    size: int = 0
    nonce: int = 0


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until it has come, or is where the reader finds it."""


class _Memory:
    """Memory with words of 8 bytes in it, which several processes read and write."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._storage = map_memory(descriptor, size)  # keeps the mapping
        self.address = self._storage.data_ptr()
        self._words = (ctypes.c_int64 * (size // 8)).from_address(self.address)

    def __getitem__(self, place: int) -> int:
        return self._words[place >> 3]

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place >> 3] = value


class Channels:
    """The channels of one process to others of its host.

    All of them make theirs, tell each other, open those of the others, and only then send. Any number of threads may.

    Args:
        ranks: Their numbers, the same on all.
        rank: This process's number.
        timeout: Seconds that a wait may take.

    Attributes:
        is_complete: Whether every one of them has channels to all others.
        most_bytes: Of one message.

    Raises:
        OSError: There is no such memory, or the system does not say when this process started.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self._places = {other: place for place, other in enumerate(ranks)}
        self._rank, self._timeout, self._pid = rank, timeout, os.getpid()
        self._started = _start_of(self._pid)
        if self._started <= 0:
            raise OSError(f"/proc/{self._pid}/stat must be readable, and is not now")
        self._room = min(max(1 << (_ROOM // len(ranks)).bit_length() - 1, _LEAST_ROOM), _MOST_ROOM)
        self.most_bytes = self._room // 2
        self._length = length = _PAGE + len(ranks) * (_HEAD + self._room)
        self._descriptor = make_memory(_NAME, length)
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self._own = _Memory(self._descriptor, length)
        self._own[_NONCE] = secrets.randbits(_NONCE_BITS)
        self.is_complete = False
        self._lock = threading.Lock()
        self._fencing = threading.RLock()  # a finalizer may close channels wherever a thread is
        self._others: dict[int, _Other] = {}
        self._is_closed = False
        self._blocked: set[int] = set()
        self._is_flushing = False
        self._numbers = itertools.count()

    def introduction(self) -> Introduction:
        """Return what the others need to open this process's memory."""
        return Introduction(self._pid, self._started, self._descriptor, self._length, self._own[_NONCE])

    def open(self, rank: int, found: Introduction) -> bool:
        """Open the memory of another process, and return whether that could be done."""
        try:
            with opened_memory(_NAME, found.size, found.pid, found.descriptor) as descriptor:
                memory = _Memory(descriptor, found.size)
        except (OSError, RuntimeError):  # RuntimeError: torch's for a mapping that fails
            return False
        if found.size != self._length or memory[_NONCE] != found.nonce:
            return False
        self._others[rank] = _Other(
            memory, found.pid, found.started, self._channel_to(rank), self._channel_to(self._rank), self._room
        )
        return True

    def seal(self, ranks: set[int], *, is_complete: bool) -> None:
        """Let these be the processes to talk to: all others that are to open this process's memory have done so."""
        self._release()
        self.is_complete = is_complete
        self._others = {rank: one for rank, one in self._others.items() if rank in ranks}

    def __contains__(self, rank: int) -> bool:
        return rank in self._others

    def send(self, rank: int, tag: int, tensor: torch.Tensor) -> Work:
        """Begin to send a contiguous tensor of the CPU, which stays as it is until that is done.

        Args:
            rank: The other process.
            tag: Tells it from other messages; those of one tag arrive in their order.
            tensor: At most ``most_bytes``, and not empty; its bytes are sent, whatever torch takes them for.

        Raises:
            RuntimeError: One of both has closed its channels.
        """
        message = _Outgoing(self, rank, tag, tensor)
        with self._lock:
            self._check_open(rank)
            self._others[rank].pending.append(message)
            self._flush(rank)
        return message

    def receive(self, rank: int, tag: int, tensor: torch.Tensor) -> Work:
        """Return a message of another process, which is in the tensor when it has been waited for.

        Those of one tag and size are received in the order in which they were asked for.

        Raises:
            RuntimeError: This process has closed its channels.
        """
        message = _Incoming(self, rank, tag, tensor)
        with self._lock:
            if self._is_closed:
                self._check_open(rank)
            self._others[rank].ask(message)
            if self._others[rank].owes_much:
                self._start_flushing()
        return message

    def close(self) -> None:
        """End what this process waits for here, and what others wait for from it; it is good for nothing afterwards."""
        if self._is_closed or os.getpid() != self._pid:  # a forked process shares the memory, and must not close it
            return
        self._is_closed = True
        self._publish(self._own, _CLOSED, 1)
        for other in [*self._others.values()]:
            self._ring(other.memory)
        self._ring(self._own)

    def wait(self, rank: int, message: _Message) -> None:
        """Wait until a message has come from a process, or has found room on its way there.

        Blocking.

        Raises:
            RuntimeError: One of both has closed its channels, the other process has ended, or it took too long.
        """
        other, own = self._others[rank], self._own
        began = looked = 0.0
        spins, pause = _SPINS, _FIRST_PAUSE
        while True:
            bell = own[_BELL]
            self._fence()
            is_over = self._is_closed or other.memory[_CLOSED] or other.is_dead  # before the last look
            with self._lock:
                if self._blocked or not spins:
                    self._go_on()
                if isinstance(message, _Incoming) and not message.is_done:
                    self._read(rank, message)
                if message.is_done:
                    return
            if is_over:
                self._check_open(rank)
            if spins:
                spins -= 1
                os.sched_yield()
                continue
            now = time.monotonic()
            began, looked = began or now, looked or now
            if now - looked >= pause:
                looked, pause = now, min(2 * pause, _LONGEST_PAUSE)
                other.is_dead = _start_of(other.pid, other.started) != other.started
                if now - began > self._timeout:
                    raise RuntimeError(
                        f"Connection timed out after {self._timeout:g} s: rank {rank} of the group has not {message}"
                    )
                continue
            _sleep(own.address + _BELL, bell, looked + pause - now)

    def _go_on(self) -> None:
        """Write what has room by now, and make room for others that wait for it; the lock is held.

        So processes that wait for room go on, whatever order they wait in.
        """
        for rank in [*self._blocked]:
            other = self._others[rank]
            if other.is_dead or other.memory[_CLOSED]:  # nobody reads there any more; waits end by an error
                other.pending.clear()
            self._flush(rank)
        for rank, other in self._others.items():
            if other.memory[other.receives + _BLOCKED]:
                self._read(rank, None)

    def _start_flushing(self) -> None:
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            threading.Thread(target=self._keep_flushing, name="distman-channels", daemon=True).start()
        except RuntimeError:  # no thread can be had, as at the end of the interpreter: then waits alone write
            self._is_flushing = False

    def _keep_flushing(self) -> None:
        """Write what waits for room, and make room for others, though the program waits for something else.

        It ends when no message of this process waits for room, and no other process may wait for this one to read.
        """
        try:
            while True:
                bell = self._own[_BELL]
                self._fence()
                with self._lock:
                    self._go_on()
                    is_over = not self._blocked and not any(one.owes_much for one in self._others.values())
                    if is_over or self._is_closed:
                        self._is_flushing = False
                        return
                _sleep(self._own.address + _BELL, bell, _LONGEST_PAUSE)
        except BaseException:  # what another process has written there makes no sense
            self.close()
            raise

    def _check_open(self, rank: int) -> None:
        other = self._others[rank]
        if self._is_closed:
            raise RuntimeError("Connection closed: this rank has given up the group")
        if other.is_dead or other.memory[_CLOSED]:
            what = "ended" if other.is_dead else "left it"
            raise RuntimeError(f"Connection closed by peer: rank {rank} of the group has {what}")

    def _flush(self, rank: int) -> None:
        """Write to a process what has room."""
        other, own = self._others[rank], self._own
        is_news = False
        for is_blocked in (False, True):
            if is_blocked:  # said before another look, as the reader says what it has read before it looks for this
                self._publish(own, other.sends + _BLOCKED, 1)
            while other.pending and self._write(other):
                is_news = True
            if not other.pending:
                own[other.sends + _BLOCKED] = 0
                self._blocked.discard(rank)
                break
        else:
            is_news = is_news or rank not in self._blocked  # its reader may make room
            self._blocked.add(rank)
            self._start_flushing()
        if is_news:
            self._ring(other.memory)

    def _write(self, other: _Other) -> bool:
        """Write the next message to a process, and return whether there was room."""
        message = other.pending[0]
        own, channel, size = self._own, other.sends, message.num_bytes
        written, read = own[channel + _WRITTEN], own[channel + _READ]
        offset = other.find_room(size, written, read) if written - read < _SLOTS else None
        if offset is None:
            return False
        ctypes.memmove(own.address + channel + _HEAD + offset, message.address, size)
        slot = channel + _FIRST_SLOT + written % _SLOTS * _SLOT
        own[slot], own[slot + 8], own[slot + 16] = size, message.tag, offset
        other.pending.popleft()  # first: a signal handler may raise, and nothing must be sent twice
        self._publish(own, channel + _WRITTEN, written + 1)
        message.is_done = True
        return True

    def _read(self, rank: int, until: _Incoming | None) -> None:
        """Read what a process has sent, until a message has come, or all; the lock is held."""
        other = self._others[rank]
        memory, channel = other.memory, other.receives
        written = memory[channel + _WRITTEN]
        if other.num_read == written:
            return
        self._fence()
        while other.num_read != written and not (until is not None and until.is_done):
            slot = channel + _FIRST_SLOT + other.num_read % _SLOTS * _SLOT
            size, tag, offset = memory[slot], memory[slot + 8], memory[slot + 16]
            if not (0 < size <= self.most_bytes and 0 <= offset <= self._room - size):
                raise RuntimeError(f"rank {rank} of the group must send {self.most_bytes} bytes at most, got {size}")
            other.num_read += 1  # first: a signal handler may raise, and nothing must be read twice
            other.hand_out(tag, size, memory.address + channel + _HEAD + offset)
            self._publish(memory, channel + _READ, other.num_read)
            if memory[channel + _BLOCKED]:
                self._ring(memory)

    def _channel_to(self, rank: int) -> int:
        return _PAGE + self._places[rank] * (_HEAD + self._room)

    def _ring(self, memory: _Memory) -> None:
        number = self._places[self._rank] * _BELL_NUMBERS + next(self._numbers) % _BELL_NUMBERS
        self._publish(memory, _BELL, number)
        _LIBC.syscall(_FUTEX, ctypes.c_void_p(memory.address + _BELL), _WAKE, _EVERYBODY, None)

    def _publish(self, memory: _Memory, place: int, value: int) -> None:
        """Write a number that no other process may see before what was done until now, and do nothing before it."""
        self._fence()
        memory[place] = value
        self._fence()

    def _fence(self) -> None:
        """Let no read or write pass this point. To let go of a lock and to take it is such a barrier, on ARM too."""
        with self._fencing:
            pass
        with self._fencing:
            pass


@dataclasses.dataclass
class _Other:
    """Another process.

    Attributes:
        memory: Its memory.
        pid: Its number.
        started: When it started, in the kernel's ticks.
        sends: Where in this process's memory the channel to it begins.
        receives: Where in its memory the channel to this process begins.
        room: Bytes for messages in a channel.
        places: Which messages to it are not read yet: number, and where they begin and end.
        pending: Messages to it that have not found room yet.
        asked: Messages from it that were asked for, and have not come, by tag and size.
        arrived: Those that have come, and were not asked for.
        num_read: How many messages from it were read.
        is_dead: Whether it has ended.
    """

    memory: _Memory
    pid: int
    started: int
    sends: int
    receives: int
    room: int
    places: collections.deque[tuple[int, int, int]] = dataclasses.field(default_factory=collections.deque)
    pending: collections.deque[_Outgoing] = dataclasses.field(default_factory=collections.deque)
    asked: dict[_Key, collections.deque[_Incoming]] = dataclasses.field(default_factory=dict)
    arrived: dict[_Key, collections.deque[ctypes.Array[ctypes.c_char]]] = dataclasses.field(default_factory=dict)
    num_read: int = 0
    is_dead: bool = False

    @property
    def owes_much(self) -> bool:
        """Whether so much is asked for that it may have no room for all of it, and wait for this process to read.

        A message takes half of the room at most, but may need that much besides: it lies in one piece.
        """
        numbers = [(len(queue), -(-size // _ALIGNMENT) * _ALIGNMENT) for (_, size), queue in self.asked.items()]
        num_bytes = sum(number * size for number, size in numbers)
        return sum(number for number, _ in numbers) >= _SLOTS or num_bytes > self.room // 2

    def find_room(self, size: int, number: int, num_read: int) -> int | None:
        """Return where a message has room, and take it; None where there is none yet.

        Args:
            size: Its size in bytes.
            number: Its number among all.
            num_read: How many have been read.
        """
        places = self.places
        while places and places[0][0] < num_read:
            places.popleft()
        start = 0
        if places:
            first, last = places[0][1], -(-places[-1][2] // _ALIGNMENT) * _ALIGNMENT
            end = first if places[-1][1] < first else self.room
            if last + size <= end:
                start = last
            elif end == first or size > first:
                return None
        places.append((number, start, start + size))
        return start

    def ask(self, message: _Incoming) -> None:
        """Fill a message with one that has come, or remember that it was asked for."""
        key = (message.tag, message.num_bytes)
        if key not in self.arrived:
            self.asked.setdefault(key, collections.deque()).append(message)
            return
        ctypes.memmove(message.address, _next(self.arrived, key), message.num_bytes)
        message.is_done = True

    def hand_out(self, tag: int, size: int, address: int) -> None:
        """Put a message into its place, or keep it until it is asked for."""
        key = (tag, size)
        if key in self.asked:
            message = _next(self.asked, key)
            ctypes.memmove(message.address, address, size)
            message.is_done = True
            return
        data = ctypes.create_string_buffer(size)
        ctypes.memmove(data, address, size)
        self.arrived.setdefault(key, collections.deque()).append(data)


def _next(queues: dict[_Key, collections.deque[T]], key: _Key) -> T:
    """Take the first of a queue out, and the queue, if it was the last."""
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


class _Message:
    """A message from or to another process, and the tensor that holds it here."""

    __slots__ = ("_channels", "_rank", "_tensor", "address", "is_done", "num_bytes", "tag")

    def __init__(self, channels: Channels, rank: int, tag: int, tensor: torch.Tensor) -> None:
        self._channels, self._rank, self._tensor, self.tag = channels, rank, tensor, tag
        self.address, self.num_bytes = tensor.data_ptr(), tensor.nbytes
        self.is_done = False  # it has come, or is where the reader finds it

    def wait(self) -> None:
        if not self.is_done:
            self._channels.wait(self._rank, self)


class _Incoming(_Message):
    __slots__ = ()

    def __str__(self) -> str:
        return "sent what this rank waits for"


class _Outgoing(_Message):
    __slots__ = ()

    def __str__(self) -> str:
        return "read what this rank sends"


_of_groups: weakref.WeakKeyDictionary[object, Channels] = weakref.WeakKeyDictionary()


def keep_for(group: object, channels: Channels) -> None:
    """Let channels be those of a process group, and be closed when it is gone."""
    _of_groups[group] = channels
    weakref.finalize(group, channels.close)


def close_those_of(group: object) -> None:
    """Close the channels of a process group, if it has any."""
    channels = _of_groups.get(group)
    if channels is not None:
        channels.close()


def map_memory(descriptor: int, size: int) -> torch.Tensor:
    """Return the memory behind a descriptor, which the mapping does not need any more."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, size)  # noqa: FBT003 - torch's
    with torch.inference_mode(mode=False):  # else nobody could write to it outside
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[arg-type]  # torch's stub


def _sleep(address: int, expected: int, seconds: float) -> None:
    """Sleep while a word has a value, no longer than so many seconds, and than until a signal.

    Source:
        futex(2), FUTEX_WAIT.
    """
    until = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))  # a timespec
    value = ctypes.c_uint32(expected & 0xFFFFFFFF)
    _LIBC.syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, value, until, None, 0)


def _start_of(pid: int, unknown: int = 0) -> int:
    """Return when a process started, in ticks; -1 if it has ended, another number where that cannot be read now.

    Source:
        proc(5): the state is the third field, the start the 22nd; the second may hold anything, and ends with ``)``.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    except OSError:  # no descriptor is free, say
        return unknown
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
