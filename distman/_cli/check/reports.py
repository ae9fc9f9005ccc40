"""What ranks have to say, brought to or from rank 0 over the store, which works where collectives do not.

While a rank waits here, signals reach it: the wait is one of Python, not of gloo.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from distman._coordination import protocol
from distman._coordination.messages import decode

if TYPE_CHECKING:
    from distman.manager import DistributedManager

Kind = TypeVar("Kind")


def gather_reports(manager: DistributedManager, name: str, report: Kind, kind: type[Kind]) -> list[Kind] | None:
    """Return on rank 0 what all ranks report, in rank order. Collective."""
    store_group = manager._state.job.store_group()
    if store_group is None:
        return [report]
    number = next(manager._state.job.barriers[name])  # the next act of all ranks, which no other one has
    keys = [protocol.report(number, name, rank) for rank in range(store_group.size)]
    store_group.store.set(keys[manager.rank], json.dumps(report))
    manager.barrier(f"distman check: {name}", timeout=manager._state.job.limits.collective)
    if not manager.is_main:
        return None
    found = store_group.store.multi_get(keys)
    store_group.store.delete_keys(keys)
    return [
        decode(text, kind, f"the report of {name} by {store_group.describe(rank)}") for rank, text in enumerate(found)
    ]


def hand_out(manager: DistributedManager, name: str, message: Kind, kind: type[Kind]) -> Kind:
    """Return on all ranks what rank 0 says. Collective."""
    store_group = manager._state.job.store_group()
    if store_group is None:
        return message
    key = protocol.message(next(manager._state.job.barriers[name]), name)
    if manager.is_main:
        store_group.store.set(key, json.dumps(message))
    manager.barrier(f"distman check: {name}", timeout=manager._state.job.limits.collective)
    return decode(store_group.store.get(key), kind, f"the message of {name} by {store_group.describe(0)}")
