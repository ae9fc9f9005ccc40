"""Ranks that wait for each other over the store: they learn which did not arrive, wants something else, or failed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from distman._base import timing
from distman._base.text import Line, printable, printable_lines
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import (
    claim,
    count,
    decode,
    decode_at_once,
    decode_text,
    encode,
    is_first,
    no_counter,
)
from distman._coordination.sync import StoreGroup
from distman._store.connection import InvalidRequestError
from distman.errors import BarrierTimeoutError, PlanMismatchError

_OPEN = "open"
_GIVEN_UP = -(2**40)
"""What is added to the counter of those that came and left, so that each that leaves knows without another call: more
ranks than there will ever be."""


Locate = Callable[[Sequence[int]], dict[int, str]]
"""Finds out where ranks of the world are, as far as it can."""


def wait_for_all(store_group: StoreGroup, key: str, *, timeout: float, locate: Locate | None = None) -> None:
    """Wait until every rank of the group has called this with the same key, which serves once.

    Ranks that came raise ``BarrierTimeoutError`` if some did not in time; one that comes later, ``RankFailedError``.
    """
    _Barrier(store_group, key).wait(timeout, locate)


@dataclasses.dataclass(frozen=True)
class _Barrier:
    """One barrier. Its outcome is what is written first: by the last rank to come, or by one that gives up."""

    store_group: StoreGroup
    key: str

    def wait(self, timeout: float, locate: Locate | None) -> None:
        store, group = self.store_group.store, self.store_group
        # Before it is counted: ranks that wait may look for it.
        store.append(protocol.arrived(self.key), f"{group.rank},")
        until = time.monotonic() + timeout
        if not self._come(timeout) and not self._wait_for_outcome(until - time.monotonic()):
            self._wait_for_answer(timeout, locate)
        passages = count(store, protocol.passages(self.key), 1)
        if passages <= 0:
            self._raise_if_given_up()
        elif passages == 2 * group.size:
            keys = (protocol.arrived, protocol.outcome, protocol.passages, protocol.late)
            store.delete_keys([key(self.key) for key in keys])

    def _come(self, timeout: float) -> bool:
        """Be counted as come, and return whether there is an outcome; the store tells it, in the same call."""
        store, group = self.store_group.store, self.store_group
        passages, outcome = protocol.passages(self.key), protocol.outcome(self.key)
        try:
            store.arrive(passages, group.size, (outcome, _OPEN), min(timeout, group.look_around_every))
        except InvalidRequestError as error:
            raise no_counter(passages, error) from None
        except dist.DistStoreError:
            return False
        return True

    def _wait_for_outcome(self, timeout: float) -> bool:
        return self.store_group.wait_until(
            lambda: bool(self.store_group.store.check([protocol.outcome(self.key)])),
            place=self.key,
            awaited=self._missing,
            key=protocol.outcome(self.key),
            timeout=timeout,
            tell=lambda record: self._give_up(self._missing(), record),
        )

    def _wait_for_answer(self, timeout: float, locate: Locate | None) -> None:
        """Give up if this is the rank that looks which are missing, or wait for its answer.

        If each looked, the store would be asked for the ranks that came by each of them.
        """
        group, key = self.store_group, protocol.late(self.key)
        until, was_complete = time.monotonic() + timing.BARRIER_LOOK, False
        while True:
            looks = is_first(group.store, key, group.rank)
            missing = self._missing() if looks or time.monotonic() > until else None
            if missing or (missing is not None and was_complete):
                error = BarrierTimeoutError(self._message(timeout, missing, locate))
                self._give_up(missing, FailureRecord.of(error, group.ranks[group.rank]))
            if self._wait_for_outcome(timing.BARRIER_NEXT_ROUND):  # the missing ones may have come while we looked
                return
            was_complete = missing == []  # the last one may be on its way to be counted, or was interrupted there

    def _missing(self) -> list[int]:
        missing = self.store_group.missing_in(protocol.arrived(self.key))
        # None came where the last to leave has deleted the list, while a watcher looks.
        return missing if len(missing) < self.store_group.size else []

    def _give_up(self, missing: Sequence[int], record: FailureRecord) -> None:
        """Let all that came know why, unless the last rank came at this moment."""
        store, outcome = self.store_group.store, json.dumps([list(missing), dataclasses.asdict(record)])
        count(store, protocol.passages(self.key), _GIVEN_UP)  # first: a rank that sees the outcome must see this too
        if decode_text(store.compare_set(protocol.outcome(self.key), "", outcome)) != outcome:
            count(store, protocol.passages(self.key), -_GIVEN_UP)

    def _raise_if_given_up(self) -> None:
        outcome = self.store_group.store.get(protocol.outcome(self.key))
        if outcome == _OPEN.encode():
            return
        missing, record = decode(outcome, tuple[list[int], FailureRecord], f"the outcome of {self.key}")
        is_late = self.store_group.rank in missing
        if is_late or record.error_type != BarrierTimeoutError.__name__:
            raise record.to_error()
        raise BarrierTimeoutError(printable(record.error_text))

    def _message(self, timeout: float, missing: Sequence[int], locate: Locate | None) -> str:
        group = self.store_group
        if not missing:
            return (
                f"{self.key} failed: within {timeout:g} s all ranks came, but not all were counted: one was "
                "interrupted as it came, or another program has written to the job's store."
            )
        ranks = [group.ranks[index] for index in missing]
        found = locate(ranks) if locate is not None else {}
        named = [
            f"{group.describe(index)}{f', {found[rank]}' if rank in found else ''}"
            for index, rank in zip(missing, ranks, strict=True)
        ]
        return (
            f"{self.key} failed: within {timeout:g} s, {len(named)} of {group.size} ranks did not come: "
            f"{'; '.join(named)}. See what they do instead."
        )


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
        self.store_group.store.compare_set(failure, "", encode(record))

    def _wait(self, key: str) -> None:
        wait_for_all(self.store_group, key, timeout=self.timeout)

    def _forget(self, key: str, *keys: str) -> None:
        if count(self.store_group.store, protocol.read_by(key), 1) == self.store_group.size:
            self.store_group.store.delete_keys([*keys, protocol.read_by(key)])

    def _quote(self, said: _Proposal) -> str:
        return f"{self.store_group.describe(said.rank)} asks for\n{printable_lines(said.text)}"
