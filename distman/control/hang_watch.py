"""Looking for waits that last too long, and having them reported once."""

from __future__ import annotations

import time
from pathlib import Path

from distman.control import whereabouts
from distman.control.hang_report import write_report
from distman.control.inquiry import Answer, Inquiries
from distman.control.post import Post

__all__ = ["HangWatch"]

_KEY = "hang report"


class HangWatch:
    """Asks all ranks for their stacks when this one waits too long for others.

    One rank of the job reports at a time, and it stays the one as long as its wait lasts.

    Args:
        post: The job.
        limit: Seconds that a wait may last.
        patience: Seconds to wait for the answers.
    """

    def __init__(self, post: Post, limit: float, patience: float) -> None:
        self._post = post
        self._limit = limit
        self._patience = patience
        self._reported: whereabouts.Waiting | None = None

    def look(self, inquiries: Inquiries) -> None:
        """Report a wait of this process that lasts too long, unless one of this job is being reported.

        Local. Blocking while the others answer. Not for the main thread, whose stack is wanted.
        """
        waits = whereabouts.waits()
        if self._reported is not None and self._reported not in waits:
            self._reported = None
            inquiries.store.delete_key(_KEY)
        late = [wait for wait in waits if time.monotonic() - wait.since > self._limit]
        if not late or self._reported is not None:
            return
        me = str(self._post.rank)
        if inquiries.store.compare_set(_KEY, "", me).decode() == me:
            self._reported = late[0]
            self._report(late[0], inquiries)

    def _report(self, wait: whereabouts.Waiting, inquiries: Inquiries) -> None:
        rank, peers = self._post.rank, self._post.peers
        reason = f"{self._post.me} waits in {wait} for {time.monotonic() - wait.since:.0f} s"
        answers = inquiries.ask([peer.rank for peer in peers if peer.rank != rank], self._patience)
        answers[rank] = Answer.here()
        write_report(reason, rank, answers, [str(peer) for peer in peers], Path.cwd())
