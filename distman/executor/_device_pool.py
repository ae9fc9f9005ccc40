"""The workers of an executor: started when needed, replaced when they have ended."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from distman._base import timing
from distman._workers.server_process import ResidentServer, WorkerStartError, spawn_server
from distman.errors import WorkerDiedError, WorkerError
from distman.executor._device_worker import DeviceWorker, add_note
from distman.executor._payload import Payload, pack
from distman.executor._task_loop import ENTRY, Settings, Task


class DevicePool:
    """One worker for each device; calls from several threads take turns."""

    def __init__(self, devices: Sequence[torch.device], timeout: float | None, initializer: Task | None) -> None:
        self.pid = os.getpid()
        self.server = ResidentServer(partial(spawn_server, ENTRY))
        self._devices = devices
        self._timeout = timeout
        self._initializer = initializer
        self._locks = [threading.Lock() for _ in devices]
        self._workers: list[DeviceWorker | None] = [None] * len(devices)
        self._num_threads = max(1, torch.get_num_threads() // len(devices))
        self._seed = torch.initial_seed()

    def call(self, task: Task, indices: Sequence[int]) -> list[object]:
        """Return what the function returns on each of these workers, whose indices ascend, in this order."""
        payload = _pack(task)
        with ExitStack() as stack:
            for index in indices:
                stack.enter_context(self._locks[index])
            workers: list[DeviceWorker] = []
            stack.callback(_end_unusable, workers)
            for index in indices:
                workers.append(self._worker(index))  # noqa: PERF401 - known to the callback as soon as it is there
            self._initialize([worker for worker in workers if not worker.is_ready])
            return self._ask(workers, payload)

    def _ask(self, workers: Sequence[DeviceWorker], payload: Payload) -> list[object]:
        with payload.in_shared_memory() as descriptor:
            for worker in workers:
                worker.send(payload, descriptor)
        return _collect(workers, self._timeout)

    def _initialize(self, workers: Sequence[DeviceWorker]) -> None:
        _collect(workers, timing.WORKER_START)
        if self._initializer is not None and workers:
            try:
                self._ask(workers, _pack(self._initializer))
            except Exception as error:
                places = ", ".join(f"{worker.index} ({self._devices[worker.index]})" for worker in workers)
                message = f"worker {places} did not start: its initializer failed: {type(error).__name__}: {error}"
                index = workers[0].index
                raise WorkerDiedError(message, device=str(self._devices[index]), index=index) from error
        for worker in workers:
            worker.is_ready = True

    def _worker(self, index: int) -> DeviceWorker:
        worker = self._workers[index]
        if worker is not None and (worker.is_gone or not worker.is_ready):
            worker.close()
            worker = None
        if worker is None:
            worker = self._workers[index] = self._start(index)
        return worker

    def _start(self, index: int) -> DeviceWorker:
        device = str(self._devices[index])
        settings = Settings(index, device, self._num_threads, (self._seed + index) % 2**63)
        try:
            return self.server.start_worker(lambda server: DeviceWorker(server, settings))
        except WorkerStartError as error:
            message = f"worker {index} ({device}) did not start: {error} Its output on standard error says why."
            raise WorkerDiedError(message, device=device, index=index) from None

    def terminate(self) -> None:
        """End the workers, whatever they do; calls that wait for them fail."""
        for worker in self._workers:
            if worker is not None:
                worker.kill()

    def close(self) -> None:
        """Wait for calls in progress, then end all processes and close all files; a second call does nothing."""
        if self.pid != os.getpid():
            return  # the processes are those of the program that this one was forked from
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            for worker in self._workers:
                if worker is not None:
                    worker.close()
            self._workers = [None] * len(self._devices)
            self.server.close()


def _end_unusable(workers: Sequence[DeviceWorker]) -> None:
    unusable = [worker for worker in workers if not worker.is_closed and (worker.is_busy or not worker.is_ready)]
    for worker in unusable:
        worker.kill()
    for worker in unusable:
        worker.end()


def _pack(task: Task) -> Payload:
    try:
        return pack(task)
    except Exception as error:
        raise TypeError(
            f"func and its arguments must be picklable, got {type(error).__name__}: {error}. "
            "Create what cannot be pickled inside the function, or pass plain values."
        ) from error


def _collect(workers: Sequence[DeviceWorker], timeout: float | None) -> list[object]:
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
            soon = time.monotonic() + timing.DEVICE_OTHERS_END
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
