"""A barrier over the store that names the ranks that did not come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from distman._coordination.failure.record import FailureRecord
from distman._coordination.store_group import StoreGroup
from distman.errors import BarrierTimeoutError, RankFailedError


def wait_for_all(
    store_group: StoreGroup,
    key: str,
    *,
    timeout: float,
    locate: Callable[[Sequence[int]], dict[int, str]] | None = None,
) -> None:
    """Wait until every rank of the circle has called this with the same key.

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
    store.set(f"{store_group.rank} is at", key)
    is_last = store.add(f"{key}/count", 1) == store_group.size
    if is_last:
        store.set(f"{key}/open", "yes")
        store.delete_key(f"{key}/count")

    def missing() -> list[int]:
        keys = [f"{index} is at" for index in range(store_group.size)]
        return [index for index, at in enumerate(keys) if not store.check([at]) or store.get(at).decode() != key]

    def is_open() -> bool:
        return is_last or bool(store.check([f"{key}/open"]))

    def look() -> None:
        if store.check([f"{key}/given up"]):
            absent, record = json.loads(store.get(f"{key}/given up"))
            is_late = store_group.rank in absent
            raise RankFailedError(**record) if is_late else BarrierTimeoutError(record["error_text"])

    while not store_group.wait_until(is_open, place=key, awaited=missing, timeout=timeout, look=look):
        absent = missing()
        if absent and not is_open():  # else the last one came while we looked
            store.add(f"{key}/count", -1)  # who comes later must not find it full
            error = BarrierTimeoutError(_message(store_group, key, timeout, absent, locate))
            record = FailureRecord.of(error, store_group.ranks[store_group.rank])
            store.set(f"{key}/given up", json.dumps([absent, dataclasses.asdict(record)]))
            raise error
    if store.add(f"{key}/left", 1) == store_group.size:
        store.delete_key(f"{key}/open")
        store.delete_key(f"{key}/left")


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
        f"all {store_group.size} ranks must come to {key} within {timeout:g} s, got none from {'; '.join(named)}. "
        "See what they do instead."
    )
