"""The store of a job of one rank, which meets nobody: a table in this process, asked as a :class:`Client` is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from distman._store.connection import GaveUpError, InvalidRequestError, StoreTimeoutError
from distman._store.frames import GIVEN_UP
from distman._store.table import NotANumberError, Table, Wait

if TYPE_CHECKING:
    from distman._store.table import Answer


class Memory:
    """Has the methods of :class:`distman._store.client.Client`, for the threads of one process."""

    session = ""
    job_key = b""
    num_unproved = 0
    unreachable_after = 0.0

    def __init__(self) -> None:
        self._table = Table()
        self._lock = threading.RLock()  # a signal's handler may ask in the middle of a call

    def again(self, _role: int, _patience: float = 0.0) -> Memory:
        """Return access for another thread: the same."""
        return self

    def set(self, key: bytes, value: bytes) -> None:
        with self._lock:
            self._table.set(key, value)

    def add(self, key: bytes, amount: int) -> int:
        try:
            with self._lock:
                return self._table.add(key, amount)
        except NotANumberError:
            raise InvalidRequestError("it is no number of 64 bits, or would not be one any more") from None

    def append(self, key: bytes, value: bytes) -> None:
        with self._lock:
            self._table.append(key, value)

    def check(self, keys: Sequence[bytes]) -> bool:
        return self._table.check(keys)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            return self._table.compare_set(key, expected, desired)

    def delete(self, *keys: bytes) -> bool:
        with self._lock:
            were_there = [self._table.delete(key) for key in keys]
        return all(were_there)

    def num_keys(self) -> int:
        return self._table.num_keys()

    def multi_set(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        with self._lock:
            self._table.multi_set(list(pairs))

    def get(self, key: bytes, limit: float) -> bytes:
        return self._wait(lambda until, answer: self._table.wait([key], None, until, answer), limit)[0]

    def multi_get(self, keys: Sequence[bytes], limit: float) -> list[bytes]:
        return self._wait(lambda until, answer: self._table.wait(keys, None, until, answer), limit)

    def wait(self, keys: Sequence[bytes], limit: float, unless: bytes = b"") -> None:
        self._wait(lambda until, answer: self._table.wait(keys, unless or None, until, answer), limit)

    def arrive(self, counter: bytes, size: int, outcome: tuple[bytes, bytes], limit: float) -> bytes:
        return self._wait(lambda until, answer: self._table.arrive(counter, size, outcome, until, answer), limit)[0]

    def register_will(self, *_: object, **__: object) -> None:
        """Do nothing: nobody hears of the end of the only rank."""

    def revoke_will(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _wait(self, begin: Callable[[float, Answer], Wait | None], limit: float) -> list[bytes]:
        is_answered = threading.Event()
        answers: list[tuple[int, Sequence[bytes]]] = []

        def answer(status: int, values: Sequence[bytes]) -> None:
            answers.append((status, values))
            is_answered.set()

        try:
            with self._lock:
                wait = begin(time.monotonic() + limit, answer)
        except NotANumberError:
            raise InvalidRequestError("the counter is no number") from None
        try:
            is_answered.wait(min(limit, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                if wait is not None:
                    self._table.cancel(wait)
        if not answers:
            raise StoreTimeoutError
        status, values = answers[0]
        if status == GIVEN_UP:
            raise GaveUpError(values[0])
        return list(values)
