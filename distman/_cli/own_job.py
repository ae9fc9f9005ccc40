"""The job that a command is itself: its start, and why a step of it ended early, in one sentence."""

from __future__ import annotations

import torch.distributed as dist

from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.record import LEFT
from distman._coordination.messages import decode_text
from distman._coordination.monitor.watcher import NO_ANSWER
from distman._torch_internals import is_lost_connection
from distman.errors import BarrierTimeoutError, JobFailed, RankFailedError
from distman.manager import DistributedManager

_MAX_NAMED = 8  # ranks named in a sentence


def start_job(method: str | None, timeout: float | None, default_timeout: float) -> DistributedManager:
    """Return the manager of a job whose ranks all end with the command's exit code, which is a verdict."""
    manager = DistributedManager.initialize(
        method=method, rendezvous_timeout=timeout, timeout=timeout or default_timeout
    )
    hook.expect_exits(1, 2)
    return manager


def explain(error: BaseException, step: str, manager: DistributedManager) -> str | None:
    """Return why a step ended early, in one sentence; None where the fault is this rank's own.

    Blocking, for a few seconds: where a collective got no answer, the ranks are asked over the store where they are.
    The first rank to ask tells the others, so that all say the same.
    """
    if isinstance(error, JobFailed):
        error.acknowledge()  # the command ends with a verdict
        return (_shared_verdict(manager) if error.error_type == LEFT else None) or _first_line(error)
    if isinstance(error, RankFailedError | BarrierTimeoutError):
        return _first_line(error)
    if not is_lost_connection(error):
        return None
    reason = _first_line(error)
    return _shared_verdict(manager, f"{step} failed: ", reason) or f"{step} failed: {reason}"


def own_fault(error: BaseException, manager: DistributedManager) -> str:
    return f"{manager.roll_call[manager.rank]} raised {type(error).__name__}: {_first_line(error)}"


def _shared_verdict(manager: DistributedManager, beginning: str = "", reason: str = "") -> str | None:
    """Return what the first rank found out; where a beginning is given and nobody has, find it out."""
    store_group = manager._state.job.store_group()
    key = protocol.STANDING_STILL
    if store_group is None:
        return None
    store = store_group.job_store
    try:
        if beginning and not store.check([key]):
            text = f"{beginning}{_who_stands_still(manager, reason)}"
            store.compare_set(key, "", text.encode(errors="backslashreplace").decode())  # of paths, say
        return printable(decode_text(store.get(key))) if store.check([key]) else None
    except dist.DistError:  # the process that served the store has gone
        return None


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
