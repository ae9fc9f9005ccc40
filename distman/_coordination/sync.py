"""How ranks wait for each other over the store: store groups, and the keys of operations that repeat."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord, Place
from distman._coordination.messages import count, read_numbers
from distman._coordination.tracking import StoreWait, current_wait
from distman._coordination.wait_scope import let_others_hear_first, raise_if_failed
from distman.errors import PlanMismatchError

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_KEYS_PER_PAGE = 64  # deleted in one go: one more call into the store in 64
_LOOKS_WITHOUT_PAUSE = 8  # ranks that are together find each other within a fraction of a millisecond
_GROWTH = 1.5  # per pause, so that a wait is overrun by half of itself at most


@dataclasses.dataclass(frozen=True)
class StoreGroup:
    """Some ranks of a job, as they talk over its store."""

    job_store: TorchStore  # the part of the store that belongs to the whole job
    store: TorchStore  # the part of it that belongs to these ranks
    rank: int  # this process's index among them
    ranks: Sequence[int]  # in the world
    peers: Sequence[Place]  # all ranks of the job, in rank order
    look_around_every: float = timing.LOOK_AROUND_EVERY  # seconds of a wait between two looks at the rest of the job
    leaving: float = timing.DEPARTED  # seconds for which a rank that left is still waited for

    @property
    def size(self) -> int:
        return len(self.ranks)

    def describe(self, index: int) -> str:
        """Return one of them in words, such as ``rank 2 (n1, pid 812)``."""
        return str(self.peers[self.ranks[index]])

    def missing_in(self, key: str) -> list[int]:
        """Return which of them have not appended themselves to a list."""
        come = {*read_numbers(self.store, key)}
        return [index for index in range(self.size) if index not in come]

    def wait_until(
        self,
        is_there: Callable[[], bool],
        *,
        place: str,  # what is waited at, for messages
        awaited: Callable[[], Iterable[int]],  # which ranks have yet to bring it, by index
        key: str | None = None,  # what ``is_there`` looks for, if it is one key: the store tells when it comes
        timeout: float | None = None,  # seconds; None: as long as the job goes on
        tell: Callable[[FailureRecord], None] | None = None,  # tells all ranks that wait; ``is_there`` sees it
    ) -> bool:
        """Wait until something is in the store, and return whether it came in time."""
        raise_if_failed()  # the store may have gone since, and torch would print a stack each time that it is asked
        if any(is_there() for _ in range(1 if key is not None else _LOOKS_WITHOUT_PAUSE)):
            return True
        began = time.monotonic()
        look_around, pause = began + self.look_around_every, timing.WAIT_FIRST_PAUSE
        longest = min(
            max(timing.WAIT_SHORTEST_PAUSE, timing.WAIT_PAUSE_PER_RANK * self.size), timing.WAIT_LONGEST_PAUSE
        )
        known: list[int] = []  # ranks that have left
        departure, departed_at = None, began  # that an awaited one of them has, and when that was seen
        with self._found_waiting(place, awaited):
            while not is_there():
                now = time.monotonic()
                is_over = timeout is not None and now > began + timeout
                if is_over or now > look_around:
                    self._check_job(is_there)
                    left = read_numbers(self.job_store, protocol.LEFT)
                    if departure is None and left != known:
                        known, departure, departed_at = left, self._departure(left, place, awaited), now
                    if departure is not None and now - departed_at > self.leaving and not is_there():
                        if tell is None:
                            raise departure.to_failure()
                        tell(departure)
                    look_around = now + max(self.look_around_every, timing.LOOK_AROUND_PER_RANK * self.size)
                if is_over:
                    return is_there()
                if key is not None:
                    until = look_around if timeout is None else min(look_around, began + timeout)
                    self.store.has_come([key], max(until - now, timing.WAIT_FIRST_PAUSE))
                else:
                    time.sleep(pause)
                    pause = min(_GROWTH * pause, longest)
        return True

    @contextlib.contextmanager
    def _found_waiting(self, place: str, awaited: Callable[[], Iterable[int]]) -> Iterator[None]:
        """For the length of a ``with`` block, let this thread be found waiting for something in the store."""
        wait = current_wait()
        if wait is None:
            yield
            return
        before = wait.store_wait
        wait.store_wait = StoreWait(place, lambda: [self.ranks[index] for index in awaited()])
        try:
            yield
        finally:
            wait.store_wait = before

    def _check_job(self, is_there: Callable[[], bool]) -> None:
        """Raise the failure, if the job has failed, be it this rank's own, or that the others wait elsewhere."""
        record, wait = FailureRecord.read(self.job_store), current_wait()
        if record is not None and not is_there():
            let_others_hear_first()
            raise record.to_failure()
        if wait is not None and wait.mismatch:
            raise PlanMismatchError(wait.mismatch)

    def _departure(self, left: Sequence[int], place: str, awaited: Callable[[], Iterable[int]]) -> FailureRecord | None:
        """Return that an awaited rank is among those that have left the job, the first one if there are several."""
        gone = next((self.ranks[index] for index in awaited() if self.ranks[index] in left), None)
        return None if gone is None else FailureRecord.left(self.peers[gone], place)


class KeySequence:
    """A new key for each operation that some ranks take part in, the same on all of them.

    A rank that asks for a key is done with all keys before. So the last rank to begin a new page of keys deletes the
    page before it. At most two pages are in the store, more only while ranks are further apart.
    """

    def __init__(self, store: TorchStore, name: str, size: int, beside: Sequence[Callable[[str], str]] = ()) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._beside = beside  # the other keys that an operation writes, each made from the first one
        self._numbers = itertools.count()

    def next(self) -> str:
        """Return the key of the next operation; all ranks ask in the same order."""
        number = next(self._numbers)
        page, place = divmod(number, _KEYS_PER_PAGE)
        if place == 0 and page > 0:
            self._begin_page(page)
        return protocol.nth(self._name, number)

    def _begin_page(self, page: int) -> None:
        counter = protocol.page(self._name, page)
        if count(self._store, counter, 1) < self._size:
            return
        numbers = range((page - 1) * _KEYS_PER_PAGE, page * _KEYS_PER_PAGE)
        keys = [protocol.nth(self._name, number) for number in numbers]
        self._store.delete_keys([counter, *keys, *(beside(key) for key in keys for beside in self._beside)])
