"""What ranks have to say, brought to or from rank 0 over the store, which works where collectives do not.

While a rank waits here, signals reach it: the wait is one of Python, not of gloo.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from distman._coordination import protocol
from distman._coordination.messages import decode
from distman._coordination.wait_scope import WaitScope
from distman.errors import BarrierTimeoutError

if TYPE_CHECKING:
    from distman.manager import DistributedManager

Kind = TypeVar("Kind")


def gather_reports(manager: DistributedManager, name: str, report: Kind, kind: type[Kind]) -> list[Kind] | None:
    """Return on rank 0, which alone waits, what all ranks report, in rank order. Collective."""
    store_group = manager._state.job.store_group()
    if store_group is None:
        return [report]
    number = next(manager._state.job.barriers[name])  # the next act of all ranks, which no other one has
    keys = [protocol.report(number, name, rank) for rank in range(store_group.size)]
    if not manager.is_main:
        store_group.store.set(keys[manager.rank], json.dumps(report))
        return None
    limit = manager._state.job.limits.collective

    def missing() -> list[int]:
        return [rank for rank in range(1, store_group.size) if not store_group.store.check([keys[rank]])]

    with WaitScope(f"report of {name}"):
        is_complete = store_group.size == 1 or store_group.wait_until(
            lambda: store_group.store.check(keys[1:]), place=f"the report of {name}", awaited=missing, timeout=limit
        )
    if not is_complete:
        who = ", ".join(map(store_group.describe, missing()))
        raise BarrierTimeoutError(
            f"gathering {name} failed: nothing came within {limit:g} s from {who}. See what they do instead."
        )
    others = [
        decode(store_group.store.get(key), kind, f"the report of {name} by {store_group.describe(rank)}")
        for rank, key in enumerate(keys[1:], start=1)
    ]
    for key in keys[1:]:
        store_group.store.delete_key(key)
    return [report, *others]


def hand_out(manager: DistributedManager, name: str, message: Kind, kind: type[Kind]) -> Kind:
    """Return on all ranks what rank 0 says, which waits for nobody. Collective."""
    store_group = manager._state.job.store_group()
    if store_group is None:
        return message
    key = protocol.message(next(manager._state.job.barriers[name]), name)
    if manager.is_main:
        store_group.store.set(key, json.dumps(message))
        return message
    limit = manager._state.job.limits.collective
    with WaitScope(f"message of {name}"):
        is_there = store_group.wait_until(
            lambda: store_group.store.check([key]),
            place=f"the message of {name}",
            awaited=lambda: [0],
            key=key,
            timeout=limit,
        )
    if not is_there:
        raise BarrierTimeoutError(
            f"{name} did not come within {limit:g} s from {store_group.describe(0)}. See what it does instead."
        )
    return decode(store_group.store.get(key), kind, f"the message of {name} by {store_group.describe(0)}")
