"""Something that some ranks do while the others wait, told over the store: done, or failed and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from distman._base.text import Line, printable
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import count, decode
from distman._coordination.sync import KeySequence, StoreGroup
from distman.errors import PlanMismatchError


class ExclusiveSections:
    """The exclusive sections that the ranks of a group come to, one after another, in the same order."""

    def __init__(self, store_group: StoreGroup) -> None:
        self.store_group = store_group
        self._keys: dict[int, KeySequence] = {}

    def begin(self, what: str, awaited: Sequence[int], *, depth: int = 0) -> ExclusiveSection:
        """Return the next section. One within another has keys of its own: those of the outer one are in use."""
        if depth not in self._keys:
            name, store_group, beside = protocol.section(depth), self.store_group, [protocol.done, protocol.done_by]
            self._keys[depth] = KeySequence(store_group.store, name, store_group.size, beside)
        return ExclusiveSection(self.store_group, self._keys[depth].next(), what, awaited)


@dataclasses.dataclass(frozen=True)
class ExclusiveSection:
    """One thing that some ranks of a group do while the others wait."""

    store_group: StoreGroup
    key: str  # where they meet in the store
    what: str  # for messages, the same on all ranks
    awaited: Sequence[int]  # which ranks must reach the end of it, by index

    def succeed(self) -> bool:
        """Say that this rank, one of those awaited, has done its part; return whether all have succeeded."""
        store = self.store_group.store
        if len(self.awaited) > 1:
            store.append(protocol.done_by(self.key), f"{self.store_group.rank},")
        is_last = len(self.awaited) == 1 or count(store, protocol.done(self.key), 1) == len(self.awaited)
        if is_last:
            store.set(self.key, json.dumps([self.what, None]))
        return is_last

    def fail(self, error: BaseException) -> FailureRecord:
        record = FailureRecord.of(error, self.store_group.ranks[self.store_group.rank])
        self._tell(record)
        return record

    def _tell(self, record: FailureRecord) -> None:
        self.store_group.store.compare_set(self.key, "", json.dumps([self.what, dataclasses.asdict(record)]))

    def _unfinished(self) -> Sequence[int]:
        if len(self.awaited) == 1:
            return self.awaited
        return sorted({*self.store_group.missing_in(protocol.done_by(self.key))}.intersection(self.awaited))

    def wait(self) -> None:
        """Wait until all that are awaited have done their part; raises RankFailedError if one of them raised."""
        store = self.store_group.store
        self.store_group.wait_until(
            lambda: store.check([self.key]), place=self.what, awaited=self._unfinished, key=self.key, tell=self._tell
        )
        what, record = decode(store.get(self.key), tuple[Line, FailureRecord | None], f"the outcome of {self.what}")
        if what != printable(self.what):
            raise PlanMismatchError(
                f"all ranks must come to the same sections in the same order, got {self.what} on "
                f"{self.store_group.describe(self.store_group.rank)} and {what} on another. Call it on every rank, "
                "not within `if rank == 0`."
            )
        if record is not None:
            raise record.to_error()
