"""Ranks that must say the same before they act together, and must all have succeeded before they go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from distman._base.text import Line, printable_lines
from distman._coordination import protocol
from distman._coordination.barrier import wait_for_all
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import claim, count, decode, decode_at_once, encode
from distman._coordination.sync import StoreGroup
from distman.errors import BarrierTimeoutError, PlanMismatchError


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """What a rank, by index, wants; what must be equal is the digest, and the text is for messages."""

    rank: int
    digest: str
    text: str


@dataclasses.dataclass(frozen=True)
class Consensus:
    """Some ranks of a job, as they take decisions over its store."""

    store_group: StoreGroup
    timeout: float  # seconds to wait for the others

    def agree(self, key: str, digest: str, text: str) -> None:
        """Go on only if all ranks bring the same digest, else PlanMismatchError shows what two of them want."""
        group, store = self.store_group, self.store_group.store
        keys = protocol.first_proposal(key), protocol.other_proposal(key)
        mine = encode(_Proposal(group.rank, digest, text))
        what = f"what a rank asks for at {key}"
        first = claim(store, keys[0], mine, lambda found: decode(found, _Proposal, what))
        if first.digest != digest:
            store.compare_set(keys[1], "", mine)
        self._wait(key)
        other = decode_at_once(store, keys[1], _Proposal, what)
        self._forget(key, *keys)
        if other is not None:
            lower, higher = sorted((first, other), key=lambda said: said.rank)
            raise PlanMismatchError(
                f"all ranks must ask for the same at {key}, but two differ. Make the calls equal on all ranks, in the "
                f"same order.\n{self._quote(lower)}\n{self._quote(higher)}"
            )

    def compare(self, key: str, mine: Mapping[str, str], *, place: str) -> None:
        """Go on only if all ranks bring the same values, else PlanMismatchError shows those of each rank."""
        group = self.store_group
        group.store.set(protocol.call(key, group.rank), json.dumps([dict(mine), place]))
        self._wait(key)
        keys = [protocol.call(key, rank) for rank in range(group.size)]
        calls = [
            decode(found, tuple[dict[Line, Line], Line], f"the call of {group.describe(index)}")
            for index, found in enumerate(group.store.multi_get(keys))
        ]
        self._forget(key, *keys)
        if any(call != calls[0][0] for call, _ in calls):
            rows = [
                f"  {group.describe(index)}: {', '.join(f'{name} {value}' for name, value in call.items())}, at {where}"
                for index, (call, where) in enumerate(calls)
            ]
            raise PlanMismatchError(
                f"all ranks must make the same call at {key}. Correct those that differ:\n" + "\n".join(rows)
            )

    def require_success(self, key: str, error: Exception | None) -> None:
        """Go on only if no rank failed: where one did, it raises its error, and the others raise RankFailedError."""
        failure = protocol.failure_of(key)
        if error is not None:
            self._tell(failure, error)
        try:
            self._wait(key)
        except BarrierTimeoutError as gave_up:
            self._tell(failure, gave_up)
            raise
        found = decode_at_once(self.store_group.store, failure, FailureRecord, f"the failure at {key}")
        self._forget(key, failure)
        if error is not None:
            raise error
        if found is not None:
            raise found.to_error()

    def _tell(self, failure: str, error: Exception) -> None:
        record = FailureRecord.of(error, self.store_group.ranks[self.store_group.rank])
        self.store_group.store.compare_set(failure, "", record.to_json())

    def _wait(self, key: str) -> None:
        wait_for_all(self.store_group, key, timeout=self.timeout)

    def _forget(self, key: str, *keys: str) -> None:
        """Delete what was written, once all ranks have read it."""
        if count(self.store_group.store, protocol.read_by(key), 1) == self.store_group.size:
            self.store_group.store.delete_keys([*keys, protocol.read_by(key)])

    def _quote(self, said: _Proposal) -> str:
        return f"{self.store_group.describe(said.rank)} asks for\n{printable_lines(said.text)}"
