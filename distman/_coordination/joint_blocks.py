"""Blocks in which all ranks wait for each other again and again: an error that leaves one on some ranks fails the job.

What all ranks raise, such as a loss that is not finite, each of them may handle and go on. What only some raise leaves
the others in a collective, for ever if the program of those catches it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._base.text import listed, printable
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import count
from distman._coordination.monitor.watcher import current
from distman._coordination.sync import KeySequence, StoreGroup
from distman._coordination.timeouts import run_with_timeout
from distman._coordination.tracking import is_outside, restriction
from distman._torch_internals import close_all_connections
from distman.errors import DistmanError, JobFailed

_MAX_NAMED = 4  # ranks in one line of the log
_MAX_ASKED = 8  # ranks, which answer with their stacks: mostly all of them wait


class JointBlocks:
    """The joint blocks of some ranks, one after another; within another one a block is a part of it."""

    def __init__(self, store_group: StoreGroup) -> None:
        self._depth = 0
        self._group = store_group
        name = protocol.JOINT_ERRORS
        self._keys = KeySequence(store_group.store, name, store_group.size, beside=[protocol.arrived])

    @contextlib.contextmanager
    def block(self, what: str) -> Iterator[None]:
        """Let an error that leaves the ``with`` block on some ranks only fail the job; one thread at a time enters."""
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth == 1 and not is_outside() and restriction() is None:
                self._judge(error, what)
            raise
        finally:
            self._depth -= 1

    def _judge(self, error: Exception, what: str) -> None:
        """Return once it is known whether all ranks have raised; if not, the job has failed, and this rank with it."""
        # The job has failed before, or the missing rank has left it, so nobody waits; or the store is gone.
        with contextlib.suppress(DistmanError, JobFailed, dist.DistError):
            key = self._keys.next()
            self._group.store.append(protocol.arrived(key), f"{self._group.rank},")
            missing = functools.partial(self._group.missing_in, protocol.arrived(key))
            until = time.monotonic() + timing.JOINT_LIMIT
            while not self._group.wait_until(
                lambda: not missing(), place=what, awaited=missing, timeout=timing.JOINT_RAISE
            ):
                is_awaited = self._is_awaited_by(missing()[:_MAX_ASKED])
                if (is_awaited or time.monotonic() > until) and (others := missing()):
                    self._fail(error, what, others)
                    return

    def _is_awaited_by(self, missing: Sequence[int]) -> bool:
        watcher = current()
        return watcher is not None and any(
            seconds > timing.JOINT_WAIT for seconds in watcher.waits_of([self._group.ranks[index] for index in missing])
        )

    def _fail(self, error: Exception, what: str, missing: Sequence[int]) -> None:
        """Let the job fail by this error, which some ranks do not have; all of them hear what to do."""
        named = listed(map(self._group.describe, missing), _MAX_NAMED)
        advice = (
            f"It has left {what} on this rank but not on {named}, so the job has failed. Handle it where it is raised, "
            "or raise it on all ranks."
        )
        record = FailureRecord.of(error, self._group.ranks[self._group.rank])
        logger.error("%s raised %s: %s. %s", what, record.error_type, printable(record.error_text), advice)
        dataclasses.replace(record, error_text=f"{record.error_text}. {advice}").publish(self._group.job_store)
        count(self._group.job_store, protocol.NEWS, 1)
        run_with_timeout(close_all_connections, timing.JOINT_RAISE)  # which ends the waits of the others
        watcher = current()
        if watcher is not None:
            watcher.wait_until_known()  # from now on nothing here waits for the others
