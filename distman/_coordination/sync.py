"""How ranks wait for each other over the store: store groups, sequences of keys, and the barrier."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from distman._coordination import protocol
from distman._coordination.failure.record import LEFT, FailureRecord, Place
from distman.errors import BarrierTimeoutError, RankFailedError

if TYPE_CHECKING:
    from torch.distributed import Store


_KEYS_PER_PAGE = 64  # deleted in one go: one more call into the store in 64
_LOOKS_WITHOUT_PAUSE = 8  # ranks that are together find each other within a fraction of a millisecond
_FIRST_PAUSE = 0.0002  # seconds: a few calls into the store
_GROWTH = 1.5  # per pause, so that a wait is overrun by half of itself at most
_PAUSE_PER_RANK = 50e-6  # seconds; 20,000 looks a second in all, about what a store answers
_SHORTEST_LIMIT = 0.005  # seconds: longer pauses would delay a small job for nothing
_LONGEST_LIMIT = 1.0  # seconds: longer ones would delay a large job more than its looks cost
_LOOK_AROUND_PER_RANK = 1e-3  # seconds; at most 1,000 times a second in all


@dataclasses.dataclass(frozen=True)
class StoreGroup:
    """Some ranks of a job, as they talk over its store.

    Attributes:
        job_store: The part of the store that belongs to the whole job.
        store: The part of it that belongs to these ranks.
        rank: This process's index among them.
        ranks: Their ranks in the world.
        peers: All ranks of the job, in rank order.
        look_around_every: Seconds of a wait between two looks at what else happened in the job.
        leaving: Seconds for which a rank that left is still waited for.
    """

    job_store: Store
    store: Store
    rank: int
    ranks: Sequence[int]
    peers: Sequence[Place]
    look_around_every: float = 0.5  # several calls into the store, which a wait for milliseconds should not cost
    leaving: float = 1.5  # a launcher or parent that knows why a rank left may end the others with that error

    @property
    def size(self) -> int:
        """Number of these ranks."""
        return len(self.ranks)

    def describe(self, index: int) -> str:
        """Return who one of them is, such as ``rank 2 (n1, pid 812)``."""
        return str(self.peers[self.ranks[index]])

    def wait_until(
        self,
        is_there: Callable[[], bool],
        *,
        place: str,
        awaited: Callable[[], Iterable[int]],
        timeout: float | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait until something is in the store, and return whether it came in time.

        Blocking.

        Args:
            is_there: Looks for it.
            place: What is waited at, for messages.
            awaited: Says which of these ranks, by index, have yet to bring it.
            timeout: Seconds to wait; None waits as long as the job goes on.
            look: Called every now and then; what it raises ends the wait.

        Raises:
            RankFailedError: The job failed, or an awaited rank left it.
        """
        began = time.monotonic()
        look_around, left_since = began + self.look_around_every, began
        num_looks, pause = 0, _FIRST_PAUSE
        longest = min(max(_SHORTEST_LIMIT, _PAUSE_PER_RANK * self.size), _LONGEST_LIMIT)
        while not is_there():
            now = time.monotonic()
            if timeout is not None and now > began + timeout:
                return False
            if now > look_around:
                look()
                record = self._look_around(place, awaited)
                has_left = record is not None and record.error_type == LEFT
                if not has_left:
                    left_since = now
                if record is not None and (not has_left or now - left_since > self.leaving) and not is_there():
                    raise record.to_error()
                look_around = now + max(self.look_around_every, _LOOK_AROUND_PER_RANK * self.size)
            num_looks += 1
            if num_looks > _LOOKS_WITHOUT_PAUSE:
                time.sleep(pause)
                pause = min(_GROWTH * pause, longest)
        return True

    def _look_around(self, place: str, awaited: Callable[[], Iterable[int]]) -> FailureRecord | None:
        """Return why there is nothing to wait for any more, or None."""
        record = FailureRecord.read(self.job_store)
        if record is not None and record.rank != self.ranks[self.rank]:
            return record
        if not self.job_store.add(protocol.LEFT, 0):
            return None
        left = (index for index in awaited() if self.job_store.check([protocol.left(self.ranks[index])]))
        return next((FailureRecord.left(self.peers[self.ranks[index]], place) for index in left), None)


class KeySequence:
    """A new key for each operation that some ranks take part in, the same on all of them.

    A rank that asks for a key is done with all keys before. So whoever is the last to begin a new page of keys
    deletes the page before it. At most two pages lie in the store, more only while ranks are further apart.

    Args:
        store: The part of the job's store that belongs to these ranks.
        name: Beginning of the keys.
        size: Number of ranks.
        beside: The other keys that an operation writes, each as a function of the first one.
    """

    def __init__(self, store: Store, name: str, size: int, beside: Sequence[Callable[[str], str]] = ()) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._beside = beside
        self._numbers = itertools.count()

    def next(self) -> str:
        """Return the key of the next operation.

        All ranks must ask in the same order.
        """
        number = next(self._numbers)
        page, place = divmod(number, _KEYS_PER_PAGE)
        if place == 0 and page > 0:
            self._begin_page(page)
        return protocol.nth(self._name, number)

    def _begin_page(self, page: int) -> None:
        """Begin a page; the last rank that does so deletes the one before."""
        counter = protocol.page(self._name, page)
        if self._store.add(counter, 1) < self._size:
            return
        self._store.delete_key(counter)
        for number in range((page - 1) * _KEYS_PER_PAGE, page * _KEYS_PER_PAGE):
            key = protocol.nth(self._name, number)
            for beside in self._beside:
                self._store.delete_key(beside(key))
            self._store.delete_key(key)


def wait_for_all(
    store_group: StoreGroup,
    key: str,
    *,
    timeout: float,
    locate: Callable[[Sequence[int]], dict[int, str]] | None = None,
) -> None:
    """Wait until every rank of the group has called this with the same key.

    Collective. Blocking. A key serves once; the last rank to leave deletes what the barrier wrote.

    Args:
        store_group: The ranks.
        key: Name of this barrier, the same on all of them and never used before.
        timeout: Seconds to wait for the others.
        locate: Finds out where ranks of the world are, as far as it can.

    Raises:
        BarrierTimeoutError: On every rank that came: some did not come within ``timeout`` seconds.
        RankFailedError: On a rank that came when the others had given up; and on every one, if the job failed or an
            awaited rank left it.
    """
    store = store_group.store
    store.set(protocol.at(store_group.rank), key)
    is_last = store.add(protocol.arrived(key), 1) == store_group.size
    if is_last:
        store.set(protocol.is_open(key), "yes")
        store.delete_key(protocol.arrived(key))

    def missing() -> list[int]:
        keys = [protocol.at(index) for index in range(store_group.size)]
        return [index for index, at in enumerate(keys) if not store.check([at]) or store.get(at).decode() != key]

    def is_open() -> bool:
        return is_last or bool(store.check([protocol.is_open(key)]))

    def look() -> None:
        if store.check([protocol.given_up(key)]):
            absent, record = json.loads(store.get(protocol.given_up(key)))
            is_late = store_group.rank in absent
            raise RankFailedError(**record) if is_late else BarrierTimeoutError(record["error_text"])

    while not store_group.wait_until(is_open, place=key, awaited=missing, timeout=timeout, look=look):
        look()  # the others may have given up before this one came, longer ago than its timeout
        absent = missing()
        if absent and not is_open():  # else the last one came while we looked
            store.add(protocol.arrived(key), -1)  # who comes later must not find it full
            error = BarrierTimeoutError(_message(store_group, key, timeout, absent, locate))
            record = FailureRecord.of(error, store_group.ranks[store_group.rank])
            store.set(protocol.given_up(key), json.dumps([absent, dataclasses.asdict(record)]))
            raise error
    if store.add(protocol.passed(key), 1) == store_group.size:
        store.delete_key(protocol.is_open(key))
        store.delete_key(protocol.passed(key))


def _message(
    store_group: StoreGroup,
    key: str,
    timeout: float,
    absent: Sequence[int],
    locate: Callable[[Sequence[int]], dict[int, str]] | None,
) -> str:
    ranks = [store_group.ranks[index] for index in absent]
    found = locate(ranks) if locate is not None else {}
    named = [
        f"{store_group.describe(i)}{f', {found[r]}' if r in found else ''}" for i, r in zip(absent, ranks, strict=True)
    ]
    return (
        f"{key} failed: within {timeout:g} s, {len(named)} of {store_group.size} ranks did not come: "
        f"{'; '.join(named)}. See what they do instead."
    )
