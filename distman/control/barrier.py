"""A barrier over the store that names the ranks that did not come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from distman.control.circle import Circle
from distman.control.notice import FailureNotice
from distman.errors import BarrierTimeoutError, RankFailedError

__all__ = ["wait_for_all"]


def wait_for_all(
    circle: Circle,
    key: str,
    *,
    timeout: float,
    locate: Callable[[Sequence[int]], dict[int, str]] | None = None,
) -> None:
    """Wait until every rank of the circle has called this with the same key.

    Collective. Blocking. A key serves once; the last rank to leave deletes what the barrier wrote.

    Args:
        circle: The ranks.
        key: Name of this barrier, the same on all of them and never used before.
        timeout: Seconds to wait for the others.
        locate: Finds out where ranks of the world are, as far as it can.

    Raises:
        BarrierTimeoutError: On every rank that came: some did not come within ``timeout`` seconds.
        RankFailedError: On a rank that came when the others had given up; and on every one, if the job failed or an
            awaited rank left it.
    """
    store = circle.store
    store.set(f"{circle.rank} is at", key)
    is_last = store.add(f"{key}/count", 1) == circle.size
    if is_last:
        store.set(f"{key}/open", "yes")
        store.delete_key(f"{key}/count")

    def missing() -> list[int]:
        keys = [f"{index} is at" for index in range(circle.size)]
        return [index for index, at in enumerate(keys) if not store.check([at]) or store.get(at).decode() != key]

    def is_open() -> bool:
        return is_last or bool(store.check([f"{key}/open"]))

    def look() -> None:
        if store.check([f"{key}/given up"]):
            absent, notice = json.loads(store.get(f"{key}/given up"))
            is_late = circle.rank in absent
            raise RankFailedError(**notice) if is_late else BarrierTimeoutError(notice["error_text"])

    while not circle.wait_until(is_open, place=key, awaited=missing, timeout=timeout, look=look):
        absent = missing()
        if absent and not is_open():  # else the last one came while we looked
            store.add(f"{key}/count", -1)  # who comes later must not find it full
            error = BarrierTimeoutError(_message(circle, key, timeout, absent, locate))
            notice = FailureNotice.of(error, circle.ranks[circle.rank])
            store.set(f"{key}/given up", json.dumps([absent, dataclasses.asdict(notice)]))
            raise error
    if store.add(f"{key}/left", 1) == circle.size:
        store.delete_key(f"{key}/open")
        store.delete_key(f"{key}/left")


def _message(
    circle: Circle,
    key: str,
    timeout: float,
    absent: Sequence[int],
    locate: Callable[[Sequence[int]], dict[int, str]] | None,
) -> str:
    ranks = [circle.ranks[index] for index in absent]
    found = locate(ranks) if locate is not None else {}
    named = [f"{circle.describe(i)}{f', {found[r]}' if r in found else ''}" for i, r in zip(absent, ranks, strict=True)]
    return (
        f"all {circle.size} ranks must come to {key} within {timeout:g} s, got none from {'; '.join(named)}. "
        "See what they do instead."
    )
