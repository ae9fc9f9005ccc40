"""A barrier over the store that names the ranks that did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distman.errors import BarrierTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["wait_for_all"]

_FIRST_PAUSE = 0.0002
_PAUSE_PER_RANK = 50e-6
_SHORTEST_LIMIT = 0.005
_LONGEST_LIMIT = 1.0


def wait_for_all(
    store: Store,
    key: str,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    describe: Callable[[int], str],
) -> None:
    """Wait until every rank has called this with the same key.

    Collective. Blocking. A key serves once; the last rank to leave deletes what the barrier wrote.

    Args:
        store: The job's store.
        key: Name of this barrier, the same on all ranks and never used before.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.
        describe: Says who a rank is, such as ``rank 2 (n1, pid 812)``.

    Raises:
        BarrierTimeoutError: On every rank that came: some did not come within ``timeout`` seconds.
    """
    store.set(f"{key}/{rank}", "here")
    if store.add(f"{key}/count", 1) == world_size:
        store.set(f"{key}/open", "yes")
    deadline = time.monotonic() + timeout
    pause, longest = _FIRST_PAUSE, min(max(_SHORTEST_LIMIT, _PAUSE_PER_RANK * world_size), _LONGEST_LIMIT)
    while not store.check([f"{key}/open"]):
        if time.monotonic() > deadline:
            missing = [other for other in range(world_size) if not store.check([f"{key}/{other}"])]
            if missing:  # else the last one came while we looked
                raise BarrierTimeoutError(
                    f"all {world_size} ranks must come to {key} within {timeout:g} s, got none from "
                    f"{', '.join(map(describe, missing))}. See what they do instead."
                )
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    if store.add(f"{key}/left", 1) == world_size:
        for name in (*range(world_size), "count", "open", "left"):
            store.delete_key(f"{key}/{name}")
