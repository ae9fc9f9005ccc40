"""Looking for waits that last too long, and having them reported once."""

from __future__ import annotations

import time
from pathlib import Path

from distman._coordination import tracking
from distman._coordination.monitor.context import WatchContext
from distman._coordination.monitor.hang_report import write_report
from distman._coordination.monitor.stack_query import Answer, StackQueries

_KEY = "hang report"


class HangWatch:
    """Asks all ranks for their stacks when this one waits too long for others.

    One rank of the job reports at a time, and it stays the one as long as its wait lasts.

    Args:
        context: The job.
        limit: Seconds that a wait may last.
        patience: Seconds to wait for the answers.
    """

    def __init__(self, context: WatchContext, limit: float, patience: float) -> None:
        self._context = context
        self._limit = limit
        self._patience = patience
        self._reported: tracking.TrackedWait | None = None

    def look(self, stack_queries: StackQueries) -> None:
        """Report a wait of this process that lasts too long, unless one of this job is being reported.

        Blocking while the others answer. Not for the main thread, whose stack is wanted.
        """
        waits = tracking.waits()
        if self._reported is not None and self._reported not in waits:
            self._reported = None
            stack_queries.store.delete_key(_KEY)
        late = [wait for wait in waits if time.monotonic() - wait.since > self._limit]
        if not late or self._reported is not None:
            return
        me = str(self._context.rank)
        if stack_queries.store.compare_set(_KEY, "", me).decode() == me:
            self._reported = late[0]
            self._report(late[0], stack_queries)

    def _report(self, wait: tracking.TrackedWait, stack_queries: StackQueries) -> None:
        rank, peers = self._context.rank, self._context.peers
        reason = f"{self._context.me} waits in {wait} for {time.monotonic() - wait.since:.0f} s"
        answers = stack_queries.ask([peer.rank for peer in peers if peer.rank != rank], self._patience)
        answers[rank] = Answer.here()
        write_report(reason, rank, answers, [str(peer) for peer in peers], Path.cwd())
