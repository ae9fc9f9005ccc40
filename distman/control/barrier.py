"""A barrier over the store that names the ranks that did not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distman.control.circle import Circle
from distman.errors import BarrierTimeoutError

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
        RankFailedError: See :meth:`distman.control.circle.Circle.wait_until`.
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

    while not circle.wait_until(is_open, place=key, awaited=missing, timeout=timeout):
        absent = missing()
        if absent:  # else the last one came while we looked
            raise BarrierTimeoutError(_message(circle, key, timeout, absent, locate))
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
