"""Why a step of a command ended early because of other ranks, found out over the store, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure.record import LEFT
from distman._coordination.messages import decode_text
from distman._coordination.monitor.watcher import NO_ANSWER
from distman._torch_internals import is_lost_connection
from distman.errors import BarrierTimeoutError, JobFailed, RankFailedError

if TYPE_CHECKING:
    from distman.manager import DistributedManager


_MAX_NAMED = 8  # ranks named in a sentence


def explain(error: BaseException, step: str, manager: DistributedManager) -> str | None:
    """Return why a step ended early, in one sentence; None where the fault is this rank's own.

    Blocking, for a few seconds: where a collective got no answer, the ranks are asked over the store where they are.
    The first rank to ask tells the others, so that all say the same.
    """
    if isinstance(error, JobFailed):
        error.acknowledge()  # the command ends with a verdict
    if isinstance(error, JobFailed | RankFailedError | BarrierTimeoutError):
        has_left = isinstance(error, JobFailed) and error.error_type == LEFT
        return (_verdict(manager) if has_left else None) or _first_line(error)  # it may have left with a verdict
    if not is_lost_connection(error):
        return None
    return _verdict(manager, f"{step} failed: ", _first_line(error))


def own_fault(error: BaseException, manager: DistributedManager) -> str:
    return f"{manager.roll_call[manager.rank]} raised {type(error).__name__}: {_first_line(error)}"


def _verdict(manager: DistributedManager, beginning: str = "", reason: str = "") -> str | None:
    """Return what the first rank found out, or find it out; without a beginning, only the former."""
    store_group = manager._state.job.store_group()
    key = protocol.STANDING_STILL
    try:
        if store_group is not None and beginning and not store_group.job_store.check([key]):
            text = f"{beginning}{_who_stands_still(manager, reason)}"
            store_group.job_store.compare_set(key, "", text.encode(errors="backslashreplace").decode())  # of paths, say
        if store_group is not None and store_group.job_store.check([key]):
            return printable(decode_text(store_group.job_store.get(key)))
    except dist.DistError:  # who served the store has gone
        pass
    return f"{beginning}{reason}" if beginning else None


def _who_stands_still(manager: DistributedManager, reason: str) -> str:
    watcher = manager._state.watcher
    others = [rank for rank in range(manager.world_size) if rank != manager.rank]
    places = watcher.locate(protocol.STANDING_STILL, others) if watcher is not None else {}
    silent = {rank: place for rank, place in places.items() if place.startswith(NO_ANSWER)}
    shown = [f"{manager.roll_call[rank]}, {place}" for rank, place in (silent or places).items()]
    named = "; ".join(shown[:_MAX_NAMED]) + (f"; and {len(shown) - _MAX_NAMED} more" if len(shown) > _MAX_NAMED else "")
    if silent:
        return f"no end on {named}. See what stopped it there."
    return f"{reason}. The others answer over the store: {named}. See the network between them." if named else reason


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
