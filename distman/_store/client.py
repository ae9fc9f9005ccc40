"""The store of a job as a process sees it, from any of its threads; keys and values are bytes, and there is no torch.

All requests go over one connection, so that they arrive in their order. A thread that waits in the store keeps it for
itself meanwhile, and the others, if there are any, go on over another one: so a wait holds up nobody.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from distman._base import timing
from distman._store import frames
from distman._store.connection import Connection, StoreLostError, is_of_a_handler
from distman._store.dialing import Door, ForeignServiceError, dial
from distman._store.frames import LIMIT, NUMBER
from distman._store.handshake import MEMBER, WATCHER, Hello, job_key

T = TypeVar("T")

_YES = b"\1"
_MILLISECONDS = 1000
_MOST_MILLISECONDS = 1 << 53  # longer than anybody waits, and exact as a number of seconds


class Client:
    """A process's access to the store of its job."""

    def __init__(self, door: Door, role: int = MEMBER, rank: int = -1) -> None:
        self.door = door
        self._rank = rank
        self._lock = threading.RLock()
        self._first, secret = self._dial(role)
        self.door = dataclasses.replace(door, secret=secret, read=None, in_line=None)
        self._all = [self._first]
        self._idle: list[Connection] = []
        self._calls: Connection | None = self._first

    @property
    def session(self) -> str:
        return self._first.answer.session.decode()

    @property
    def store_pid(self) -> int:
        return self._first.answer.pid

    @property
    def job_key(self) -> bytes:
        """The key that only the ranks of this session have; empty where there is no secret to derive it from."""
        if self.door.secret:
            return job_key(self.door.secret, self._first.answer.session)
        return self._first.answer.drawn_key

    def again(self, role: int, patience: float = math.inf) -> Client:
        """Return another access to the same store, with connections of its own; give up a reply after some seconds."""
        self._first.raise_if_lost()  # a forked child must not dial for itself
        other = self._until_let_in(lambda: Client(self.door, role, self._rank))
        other._first.patience = patience
        return other

    def close(self) -> None:
        """Close all connections; calls in other threads end with an error."""
        for connection in self._all:
            connection.close()

    @property
    def num_unproved(self) -> int:
        """How many came to the store, and did not prove that they know this job's secret, or found that it does not."""
        number: int = NUMBER.unpack(self._call(frames.NUM_UNPROVED))[0]
        return number

    def members(self) -> set[int]:
        """Return the ranks whose processes use the store, or are on a host that does not answer any more."""
        return {NUMBER.unpack(rank)[0] for rank in frames.unpack(self._call(frames.MEMBERS))}

    def set(self, key: bytes, value: bytes) -> None:
        """Set a key, and do not wait until that is done: it is, for whatever this process asks next."""
        self._call(frames.SET, key, value)

    def add(self, key: bytes, amount: int) -> int:
        total: int = NUMBER.unpack(self._call(frames.ADD, key, NUMBER.pack(amount)))[0]
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Add to the end of a value, and do not wait until that is done, as with :meth:`set`."""
        self._call(frames.APPEND, key, value)

    def check(self, keys: Sequence[bytes]) -> bool:
        return self._call(frames.CHECK, *keys) == _YES

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._call(frames.COMPARE_SET, key, expected, desired)

    def delete(self, *keys: bytes) -> bool:
        return self._call(frames.DELETE, *keys) == _YES

    def num_keys(self) -> int:
        number: int = NUMBER.unpack(self._call(frames.NUM_KEYS))[0]
        return number

    def multi_set(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._call(frames.MULTI_SET, *[part for pair in pairs for part in pair])

    def get(self, key: bytes, limit: float) -> bytes:
        """Return the value of a key, once it is set; raise StoreTimeoutError after so many seconds."""
        return self._wait_for(frames.GET, limit, key)

    def multi_get(self, keys: Sequence[bytes], limit: float) -> list[bytes]:
        """Return the values of several keys at one time, once all of them are set, as :meth:`get` does."""
        return frames.unpack(self._wait_for(frames.MULTI_GET, limit, *keys))

    def wait(self, keys: Sequence[bytes], limit: float, unless: bytes = b"") -> None:
        """Wait until all keys are set; raise StoreTimeoutError in the end, GaveUpError as soon as ``unless`` is set."""
        self._wait_for(frames.WAIT, limit, unless, *keys)

    def arrive(self, counter: bytes, size: int, outcome: tuple[bytes, bytes], limit: float) -> bytes:
        """Count this one as come, wait until so many have, and return the outcome."""
        # The last one to come sets the key of the outcome to its value, unless one that gave up has set it before: all
        # that come hear the same. One that gives up with StoreTimeoutError is still counted as come.
        return self._wait_for(frames.ARRIVE, limit, counter, NUMBER.pack(size), *outcome)

    def register_will(
        self, key: bytes, counter: bytes, *, unless: bytes, if_closed: bytes, if_unreachable: bytes
    ) -> None:
        self._call(frames.WILL, key, counter, unless, if_closed, if_unreachable)

    def revoke_will(self) -> None:
        self._call(frames.WILL)

    def shut(self) -> None:
        """Let nobody in any more; the address is free when this returns."""
        self._call(frames.SHUT)

    def _call(self, operation: int, *fields: bytes) -> bytes:
        """Make a call that is answered at once, or not at all."""
        self._first.raise_if_lost()  # before the lock, which some thread of a forked child's parent may have
        with self._lock:
            connection, self._calls = self._current(), None  # a signal's handler in the middle of it takes another one
            try:
                return connection.call(operation, *fields)
            finally:
                self._give_back(connection)

    def _wait_for(self, operation: int, seconds: float, *fields: bytes) -> bytes:
        """Make a call that may take long, over a connection that other threads do not use meanwhile."""
        self._first.raise_if_lost()
        with self._lock:
            connection = self._current()
            if connection.has_unanswered:
                connection.call(frames.CHECK)  # what was set before must be seen by a thread that asks over another one
            self._calls = None
        try:
            return connection.call(operation, limit_of(seconds), *fields)
        finally:
            self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if self._calls is None:
                self._calls = connection
            else:
                self._idle.append(connection)

    def _current(self) -> Connection:
        """Return the connection for calls; where a thread waits over it, another one takes its place."""
        if self._calls is None:
            self._calls = self._idle.pop() if self._idle else self._dial_another()
        return self._calls

    def _dial_another(self) -> Connection:
        connection, _ = self._until_let_in(lambda: self._dial(WATCHER))
        self._all.append(connection)
        try:
            self._first.raise_if_lost()
        except StoreLostError:  # another thread has closed them all meanwhile, and did not see this one
            connection.close()
            raise
        return connection

    def _dial(self, role: int) -> tuple[Connection, bytes | None]:
        return dial(self.door, Hello(role, self._rank, os.getpid()))

    def _until_let_in(self, enter: Callable[[], T]) -> T:
        """Return what comes of dialling a store that is known, though a flood of strangers may push this one out."""
        # As long as its host may be silent, so may it: a flood must not end the job.
        deadline = time.monotonic() + self.door.unreachable_after
        while True:
            try:
                return enter()
            except (OSError, ForeignServiceError) as error:
                if is_of_a_handler(error):
                    raise
                is_pushed_out = isinstance(error, ConnectionResetError | BrokenPipeError | TimeoutError)
                if not is_pushed_out or time.monotonic() > deadline:
                    raise StoreLostError(f"the job's store cannot be connected to any more: {error}") from error
            # A store without room sends everybody away at once, and nothing tells when it has some.
            time.sleep(timing.ENTER_PAUSE)


def limit_of(seconds: float) -> bytes:
    milliseconds = min(seconds * _MILLISECONDS, _MOST_MILLISECONDS)
    return LIMIT.pack(max(0, math.ceil(milliseconds)))
