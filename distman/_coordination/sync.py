"""How ranks wait for each other over the store: store groups, who looks for those that are missing, and keys."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord, Place
from distman._coordination.messages import add_to, count
from distman._coordination.monitor.current_watcher import let_others_hear_first, raise_if_failed
from distman._coordination.tracking import StoreWait, current_wait
from distman.errors import PlanMismatchError

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_KEYS_PER_PAGE = 64  # deleted in one go: one more call into the store in 64
_LOOKS_WITHOUT_PAUSE = 8  # ranks that are together find each other within a fraction of a millisecond
_FIRST_PAUSE = 0.0002  # seconds: a few calls into the store
_GROWTH = 1.5  # per pause, so that a wait is overrun by half of itself at most
_PAUSE_PER_RANK = 50e-6  # seconds; 20,000 looks a second in all, about what a store answers
_SHORTEST_LIMIT = 0.005  # seconds: longer pauses would delay a small job for nothing
_LONGEST_LIMIT = 1.0  # seconds: longer ones would delay a large job more than its looks cost
_LOOK_AROUND_PER_RANK = 1e-3  # seconds; at most 1,000 times a second in all
_LOOKER_PATIENCE = 10.0  # seconds for who looks to find out; a rank that does not answer is waited for a second or two
_LOOKER_PATIENCE_PER_RANK = 1e-3  # seconds; it asks the store once or twice for each rank


@dataclasses.dataclass(frozen=True)
class StoreGroup:
    """Some ranks of a job, as they talk over its store."""

    job_store: TorchStore  # the part of the store that belongs to the whole job
    store: TorchStore  # the part of it that belongs to these ranks
    rank: int  # this process's index among them
    ranks: Sequence[int]  # in the world
    peers: Sequence[Place]  # all ranks of the job, in rank order
    # Seconds of a wait between two looks at what else happened in the job: several calls into the store, which a wait
    # for milliseconds should not cost.
    look_around_every: float = 0.5
    # Seconds for which a rank that left is still waited for: a launcher or parent that knows why it left may end the
    # others with that error.
    leaving: float = 1.5

    @property
    def size(self) -> int:
        return len(self.ranks)

    def describe(self, index: int) -> str:
        """Return who one of them is, such as ``rank 2 (n1, pid 812)``."""
        return str(self.peers[self.ranks[index]])

    def looker(self, operation: str, cause: str) -> Looker:
        """Return what elects one of these ranks to look for those that do not come to an operation."""
        patience = _LOOKER_PATIENCE + _LOOKER_PATIENCE_PER_RANK * self.size
        return Looker(self.store, protocol.looker(operation, cause), self.rank, patience)

    def wait_until(
        self,
        is_there: Callable[[], bool],
        *,
        place: str,  # what is waited at, for messages
        awaited: Callable[[], Iterable[int]],  # who has yet to bring it, by index
        key: str | None = None,  # what ``is_there`` looks for, if it is one key: the store tells when it comes
        timeout: float | None = None,  # seconds; None: as long as the job goes on
        operation: str | None = None,  # used once; one of the ranks that wait in it looks for ranks that left
        tell: Callable[[FailureRecord], None] | None = None,  # tells all that wait, in a way that ``is_there`` sees
    ) -> bool:
        """Wait until something is in the store, and return whether it came in time."""
        raise_if_failed()  # the store may have gone since, and torch would print a stack each time that it is asked
        if any(is_there() for _ in range(1 if key is not None else _LOOKS_WITHOUT_PAUSE)):
            return True
        began = time.monotonic()
        look_around, pause = began + self.look_around_every, _FIRST_PAUSE
        longest = min(max(_SHORTEST_LIMIT, _PAUSE_PER_RANK * self.size), _LONGEST_LIMIT)
        with contextlib.ExitStack() as stack:
            looker = stack.enter_context(self.looker(operation, "left")) if operation is not None else None
            stack.enter_context(self._found_waiting(place, awaited))
            leavers = _Leavers(self, place, awaited, looker, is_there)
            while not is_there():
                now = time.monotonic()
                is_over = timeout is not None and now > began + timeout
                if is_over or now > look_around:
                    self._check_job(is_there)
                    _raise_if_mismatched()
                    left = leavers.find(now)
                    if left is not None and not is_there():
                        if tell is None:
                            raise left.to_failure()
                        tell(left)
                    look_around = now + max(self.look_around_every, _LOOK_AROUND_PER_RANK * self.size)
                if is_over:
                    return is_there()
                if key is not None:
                    until = look_around if timeout is None else min(look_around, began + timeout)
                    self.store.has_come([key], max(until - now, _FIRST_PAUSE))
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
        """Raise the failure, if the job has failed, be it this rank's own: the others do not come any more."""
        record = FailureRecord.read(self.job_store)
        if record is not None and not is_there():
            let_others_hear_first()
            raise record.to_failure()


def _raise_if_mismatched() -> None:
    wait = current_wait()
    if wait is not None and wait.mismatch:
        raise PlanMismatchError(wait.mismatch)


class Looker:
    """Elects the one of several waiting ranks that looks for those which do not come; the others read its answer.

    If each looked for each, a thousand ranks would ask the store a million times. Where the answer does not come for
    long, another rank takes its place. A context manager: who is elected stands down when its own wait ends.
    """

    def __init__(self, store: TorchStore, key: str, rank: int, patience: float) -> None:
        self._store = store
        self._key = key  # used by one wait
        self._me = str(rank).encode()
        self._patience = patience  # seconds for the answer
        self._elected = b""
        self._since = 0.0

    def __enter__(self) -> Looker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._elected == self._me:
            with contextlib.suppress(dist.DistError):  # the store may be what ended the wait
                self._store.delete_key(self._key)

    def is_me(self) -> bool:
        """Return whether this rank is the one that looks, now that it would like to."""
        if self._elected == self._me:
            return True
        now = time.monotonic()
        is_overdue = bool(self._elected) and now - self._since > self._patience
        expected = self._elected if is_overdue else b""
        elected = self._compare_set(expected)
        if expected and elected == expected:  # so the store answers where that one has stood down, and nobody stands
            elected = self._compare_set(b"")
        if elected != self._elected:
            self._elected, self._since = elected, now
        return elected == self._me

    def _compare_set(self, expected: bytes) -> bytes:
        return self._store.compare_set(self._key, expected, self._me)


class _Leavers:
    """Finds awaited ranks that left the job; it looks again only when another rank has left."""

    def __init__(
        self,
        store_group: StoreGroup,
        place: str,
        awaited: Callable[[], Iterable[int]],
        looker: Looker | None,
        is_there: Callable[[], bool],
    ) -> None:
        self._group = store_group
        self._place = place
        self._awaited = awaited
        self._looker = looker
        self._is_there = is_there
        self._num_left = 0
        self._found: FailureRecord | None = None
        self._since = 0.0

    def find(self, now: float) -> FailureRecord | None:
        """Return that an awaited rank left, once that is known for a while; None where another rank looks."""
        if self._found is None:
            self._look(now)
        return self._found if self._found is not None and now - self._since > self._group.leaving else None

    def _look(self, now: float) -> None:
        group = self._group
        num_left = count(group.job_store, protocol.LEFT)
        if num_left == self._num_left:
            return
        # Who is elected after another one has stood down need not look: that one has told what it found.
        if self._looker is not None and (not self._looker.is_me() or self._is_there()):
            return
        self._num_left = num_left
        left = (index for index in self._awaited() if group.job_store.check([protocol.left(group.ranks[index])]))
        first = next(left, None)
        if first is not None:
            self._found, self._since = FailureRecord.left(group.peers[group.ranks[first]], self._place), now


class KeySequence:
    """A new key for each operation that some ranks take part in, the same on all of them.

    A rank that asks for a key is done with all keys before. So whoever is the last to begin a new page of keys
    deletes the page before it. At most two pages lie in the store, more only while ranks are further apart.
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
        """Begin a page; the last rank that does so deletes the one before."""
        counter = protocol.page(self._name, page)
        if add_to(self._store, counter, 1) < self._size:
            return
        numbers = range((page - 1) * _KEYS_PER_PAGE, page * _KEYS_PER_PAGE)
        keys = [protocol.nth(self._name, number) for number in numbers]
        self._store.delete_keys([counter, *keys, *(beside(key) for key in keys for beside in self._beside)])
