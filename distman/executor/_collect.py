"""Waiting for the answers of workers: all of them, the first failure, or the end of the time."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from distman.errors import WorkerError
from distman.executor._device_worker import DeviceWorker, add_note

# Seconds. A mistake in the function often shows on all devices at once, and a worker that comes to its own end within
# this time need not be replaced.
_AFTER_FAILURE_SECONDS = 0.5


def collect(workers: Sequence[DeviceWorker], timeout: float | None) -> list[object]:
    """Return the answers of workers that have been sent a task, in their order, or raise as the first that failed.

    After a failure the other workers are given half a second; those still busy are left so.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    waiting = list(workers)
    answers: dict[int, object] = {}
    failures: list[Exception] = []
    while waiting:
        ready = _wait(waiting, deadline)
        if not ready:
            if not failures and timeout is not None:
                failures.append(waiting.pop(0).too_late(timeout))
            break
        for worker in ready:
            waiting.remove(worker)
            try:
                answers[worker.index] = worker.answer()
            except Exception as error:  # noqa: BLE001 - whatever a function raises
                failures.append(error)
        if failures:
            soon = time.monotonic() + _AFTER_FAILURE_SECONDS
            deadline = soon if deadline is None else min(deadline, soon)
    if failures:
        raise _first(failures, waiting) from failures[0].__cause__
    return [answers[worker.index] for worker in workers]


def _wait(waiting: Sequence[DeviceWorker], deadline: float | None) -> list[DeviceWorker]:
    """Return those that have answered or ended, none if the time is over."""
    poller = select.poll()
    for worker in waiting:
        poller.register(worker.connection, select.POLLIN)
        poller.register(worker.life, select.POLLIN)
    limit = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    ready = {descriptor for descriptor, _ in poller.poll(limit)}
    return [worker for worker in waiting if ready & {worker.connection.fileno(), worker.life.fileno()}]


def _first(failures: Sequence[Exception], abandoned: Sequence[DeviceWorker]) -> Exception:
    """Return the first failure, with a line on each of the other workers that have no answer."""
    first, *others = failures
    lines = [str(_described(other)).partition("\n")[0] for other in others]
    lines += [f"worker {worker.index} was still busy and is ended" for worker in abandoned]
    if _described(first) is first and lines:
        first.args = ("\n".join([str(first).rstrip(), "", *lines]),)
    else:
        for line in lines:
            add_note(first, line)
    return first


def _described(failure: Exception) -> BaseException:
    """Return the error that says where and how a worker failed; what the function raised has that as its cause."""
    return failure.__cause__ if isinstance(failure.__cause__, WorkerError) else failure
