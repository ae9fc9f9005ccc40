"""What ranks have to say, brought to or from rank 0 over the store, which works where collectives do not.

While a rank waits here, signals reach it: the wait is one of Python, not of gloo.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distman.control.collective import Meeting
from distman.errors import BarrierTimeoutError

if TYPE_CHECKING:
    from distman.manager import DistributedManager

__all__ = ["gather_reports", "hand_out"]


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


def hand_out(manager: DistributedManager, name: str, message: object) -> Any:
    """Return on all ranks what rank 0 says.

    Collective. Rank 0 waits for nobody, the others for rank 0.

    Args:
        manager: The manager.
        name: What it is about, for messages; the same on all ranks.
        message: Anything that JSON can hold; rank 0's counts.

    Raises:
        RankFailedError: On the other ranks: a rank failed, or rank 0 left the job.
        BarrierTimeoutError: On the other ranks: rank 0 said nothing within the timeout of collectives.
    """
    circle = manager._job.circle()
    if circle is None:
        return message
    key = f"message {next(manager._job.barriers)} of {name}"
    if manager.is_main:
        circle.store.set(key, json.dumps(message))
        return message
    limit = manager._job.limits.collective
    with Meeting(f"message of {name}"):
        is_there = circle.wait_until(
            lambda: circle.store.check([key]), place=f"the message of {name}", awaited=lambda: [0], timeout=limit
        )
    if not is_there:
        raise BarrierTimeoutError(
            f"rank 0 must say what {name} is within {limit:g} s, got nothing from {circle.describe(0)}. See what it "
            "does."
        )
    return json.loads(circle.store.get(key))
