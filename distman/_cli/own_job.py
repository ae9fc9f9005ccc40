"""The job that a command is itself: its start, what its ranks report, and why a step of it ended early.

Reports go over the store, which works where collectives do not. While a rank waits for one, signals reach it: the wait
is one of Python, not of gloo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TypeVar

import torch.distributed as dist

from distman._base.text import listed
from distman._cli.output import MAX_NAMED
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.messages import decode
from distman._coordination.monitor.watcher import NO_ANSWER
from distman._torch_internals import is_lost_connection
from distman.errors import BarrierTimeoutError, JobFailed, RankFailedError
from distman.manager import DistributedManager

Kind = TypeVar("Kind")


def start_job(method: str | None, timeout: float | None, default_timeout: float) -> DistributedManager:
    """Return the manager of a job whose ranks all end with the command's exit code, which is a verdict."""
    manager = DistributedManager.initialize(
        method=method, rendezvous_timeout=timeout, timeout=timeout or default_timeout
    )
    hook.expect_exits(1, 2)
    return manager


def gather_reports(manager: DistributedManager, name: str, report: Kind, kind: type[Kind]) -> list[Kind] | None:
    """Return on rank 0 what all ranks report, in rank order. Collective."""
    store_group = manager._state.job.store_group()
    if store_group is None:
        return [report]
    number = next(manager._state.job.barriers[name])  # the next act of all ranks, which no other one has
    keys = [protocol.report(number, name, rank) for rank in range(store_group.size)]
    store_group.store.set(keys[manager.rank], json.dumps(report, default=dataclasses.asdict))
    manager.barrier(f"distman check: {name}")
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
    manager.barrier(f"distman check: {name}")
    return decode(store_group.store.get(key), kind, f"the message of {name} by {store_group.describe(0)}")


def explain(error: BaseException, step: str, manager: DistributedManager) -> str | None:
    """Return why a step ended early, in one sentence; None where the fault is this rank's own.

    Blocking, for a few seconds: where a collective got no answer, ranks 0 and 1, which tell it, ask the others over the
    store where they are.
    """
    if isinstance(error, JobFailed):
        error.acknowledge()  # the command ends with a verdict
    if isinstance(error, JobFailed | RankFailedError | BarrierTimeoutError):
        return first_line(error)
    if not is_lost_connection(error):
        return None
    reason = first_line(error)
    if manager.rank < 2:
        with contextlib.suppress(dist.DistError):  # the process that served the store has gone
            reason = _who_stands_still(manager, reason)
    return f"{step} failed: {reason}"


def own_fault(error: BaseException, manager: DistributedManager) -> str:
    return f"{manager.roll_call[manager.rank]} raised {type(error).__name__}: {first_line(error)}"


def _who_stands_still(manager: DistributedManager, reason: str) -> str:
    watcher = manager._state.watcher
    others = [rank for rank in range(manager.world_size) if rank != manager.rank]
    places = watcher.locate(others) if watcher is not None else {}
    silent = {rank: place for rank, place in places.items() if place.startswith(NO_ANSWER)}
    shown = [f"{manager.roll_call[rank]}, {place}" for rank, place in (silent or places).items()]
    where = listed(shown, MAX_NAMED, "; ")
    if silent:
        return f"no end on {where}. See what stopped it there."
    return f"{reason}. The others answer over the store: {where}. See the network between them." if where else reason


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
