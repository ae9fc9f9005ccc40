"""Ranks that must say the same before they act together, and must all have succeeded before they go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distman.control.barrier import wait_for_all
from distman.control.failure import FailureNotice
from distman.errors import BarrierTimeoutError, PlanMismatchError, RankFailedError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Council"]


@dataclasses.dataclass(frozen=True)
class Council:
    """All ranks of a job, as they take decisions over its store.

    Attributes:
        store: The job's store.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.
        describe: Says who a rank is, such as ``rank 2 (n1, pid 812)``.
    """

    store: Store
    rank: int
    world_size: int
    timeout: float
    describe: Callable[[int], str]

    def agree(self, key: str, digest: str, text: str) -> None:
        """Go on only if all ranks bring the same digest.

        Collective. Blocking.

        Args:
            key: Name of this decision, the same on all ranks and never used before.
            digest: What must be equal.
            text: What this rank wants, for messages.

        Raises:
            PlanMismatchError: On every rank: two of them differ; it shows what both want.
            BarrierTimeoutError: On every rank that came: some did not come in time; it names them.
        """
        mine = json.dumps({"rank": self.rank, "digest": digest, "text": text})
        first = json.loads(self.store.compare_set(f"{key}/first", "", mine))
        if first["digest"] != digest:
            self.store.compare_set(f"{key}/other", "", mine)
        self._wait(key)
        other = json.loads(self.store.get(f"{key}/other")) if self.store.check([f"{key}/other"]) else None
        self._forget(key, "first", "other")
        if other is not None:
            lower, higher = sorted((first, other), key=lambda said: int(said["rank"]))
            raise PlanMismatchError(
                f"all ranks must ask for the same at {key}, but two differ. Make the calls equal on all ranks, in the "
                f"same order.\n{self._quote(lower)}\n{self._quote(higher)}"
            )

    def compare(self, key: str, mine: Mapping[str, str], *, place: str) -> None:
        """Go on only if all ranks bring the same values.

        Collective. Blocking.

        Args:
            key: Name of this comparison, the same on all ranks and never used before.
            mine: What must be equal, by name.
            place: Where in the program this rank is; it may differ, and is shown when something else does.

        Raises:
            PlanMismatchError: On every rank: something differs; a table shows each rank's values.
            BarrierTimeoutError: On every rank that came: some did not come in time; it names them.
        """
        self.store.set(f"{key}/call {self.rank}", json.dumps([dict(mine), place]))
        self._wait(key)
        keys = [f"{key}/call {rank}" for rank in range(self.world_size)]
        calls = [json.loads(text) for text in self.store.multi_get(keys)]
        self._forget(key, *(f"call {rank}" for rank in range(self.world_size)))
        if any(call != calls[0][0] for call, _ in calls):
            rows = [
                f"  {self.describe(rank)}: {', '.join(f'{name} {value}' for name, value in call.items())}, at {where}"
                for rank, (call, where) in enumerate(calls)
            ]
            raise PlanMismatchError(
                f"all ranks must make the same call at {key}. Correct those that differ:\n" + "\n".join(rows)
            )

    def settle(self, key: str, error: Exception | None) -> None:
        """Go on only if no rank failed.

        Collective. Blocking.

        Args:
            key: Name of this decision, the same on all ranks and never used before.
            error: Why this rank failed; None if it did not.

        Raises:
            Exception: The given one, on the rank that brings one.
            RankFailedError: On the other ranks: a rank failed, or gave up waiting before this one came.
            BarrierTimeoutError: On every rank that came: some did not come in time; it names them.
        """
        if error is not None:
            self._tell(key, error)
        try:
            self._wait(key)
        except BarrierTimeoutError as gave_up:
            self._tell(key, gave_up)
            raise
        found = json.loads(self.store.get(f"{key}/failure")) if self.store.check([f"{key}/failure"]) else None
        self._forget(key, "failure")
        if error is not None:
            raise error
        if found is not None:
            raise RankFailedError(**found)

    def _tell(self, key: str, error: Exception) -> None:
        notice = json.dumps(dataclasses.asdict(FailureNotice.of(error, self.rank)))
        self.store.compare_set(f"{key}/failure", "", notice)

    def _wait(self, key: str) -> None:
        wait_for_all(
            self.store,
            key,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
            describe=self.describe,
        )

    def _forget(self, key: str, *names: str) -> None:
        """Delete what was written, once all ranks have read it."""
        if self.store.add(f"{key}/read", 1) == self.world_size:
            for name in (*names, "read"):
                self.store.delete_key(f"{key}/{name}")

    def _quote(self, said: dict[str, str]) -> str:
        return f"{self.describe(int(said['rank']))} asks for\n{said['text']}"
