"""What every rank has to say, brought to rank 0 over the store, which works where collectives do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distman.control.collective import Meeting
from distman.errors import BarrierTimeoutError

if TYPE_CHECKING:
    from distman.manager import DistributedManager

__all__ = ["gather_reports"]


def gather_reports(manager: DistributedManager, name: str, report: object) -> list[Any] | None:
    """Return what all ranks report, in rank order, on rank 0.

    Collective. Rank 0 waits for all, the others for nobody.

    Args:
        manager: The manager.
        name: What is reported, for messages; the same on all ranks.
        report: Anything that JSON can hold.

    Returns:
        The reports on rank 0; None elsewhere.

    Raises:
        RankFailedError: On rank 0: another rank failed, or left the job.
        BarrierTimeoutError: On rank 0: ranks did not report within the timeout of collectives.
    """
    circle = manager._job.circle()
    if circle is None:
        return [report]
    number = next(manager._job.barriers)  # the next act of all ranks, which no other one has
    keys = [f"report {number} of {name}/{rank}" for rank in range(circle.size)]
    if not manager.is_main:
        circle.store.set(keys[manager.rank], json.dumps(report))
        return None
    limit = manager._job.limits.collective

    def missing() -> list[int]:
        return [rank for rank in range(1, circle.size) if not circle.store.check([keys[rank]])]

    with Meeting(f"report of {name}"):
        is_complete = circle.size == 1 or circle.wait_until(
            lambda: circle.store.check(keys[1:]), place=f"the report of {name}", awaited=missing, timeout=limit
        )
    if not is_complete:
        who = ", ".join(map(circle.describe, missing()))
        raise BarrierTimeoutError(
            f"all {circle.size} ranks must report {name} within {limit:g} s, got none from {who}. See what they do."
        )
    others = [json.loads(circle.store.get(key)) for key in keys[1:]]
    for key in keys[1:]:
        circle.store.delete_key(key)
    return [report, *others]
