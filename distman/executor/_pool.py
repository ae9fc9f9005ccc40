"""The workers of an executor: started when needed, asked, and replaced when they have ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from distman._base import timing
from distman._base.text import printable, printable_lines
from distman._workers.output import describe_exit
from distman._workers.server_process import ResidentServer, ServerProcess, WorkerProcess, WorkerStartError
from distman._workers.sockets import is_readable, socket_pair
from distman.errors import WorkerDiedError, WorkerError
from distman.executor._payload import Kind, Payload, pack, receive, send
from distman.executor._task_loop import ENTRY, Failure, Settings, Task


class DevicePool:
    """One worker for each device; calls from several threads take turns."""

    def __init__(self, devices: Sequence[torch.device], timeout: float | None, initializer: Task | None) -> None:
        self.pid = os.getpid()
        self.server = ResidentServer(partial(ServerProcess, ENTRY))
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
            _add_note(first, line)
    return first


def _described(failure: Exception) -> BaseException:
    """Return the error that says where and how a worker failed; what the function raised has that as its cause."""
    return failure.__cause__ if isinstance(failure.__cause__, WorkerError) else failure


class DeviceWorker(WorkerProcess):
    """A worker process, for one task at a time; its ``connection`` is readable when it has answered or ended."""

    def __init__(self, server: ServerProcess, settings: Settings) -> None:
        self._settings = settings
        self.is_busy = self.is_ready = False
        self.connection, theirs = socket_pair()
        with theirs:
            super().__init__(server, dataclasses.asdict(settings), theirs.fileno())

    def send(self, payload: Payload, descriptor: int | None) -> None:
        self.is_busy = True
        try:
            send(self.connection, Kind.TASK, payload, descriptor)
        except (BrokenPipeError, ConnectionResetError):
            raise self.died() from None

    def answer(self) -> object:
        """Return what the function returned there, or raise it. It must have answered or ended."""
        message = receive(self.connection, waits=False)
        if message is None:
            raise self.died()
        self.is_busy = False
        try:
            value = message.contents()
        except Exception as error:
            raise self._error(
                f"returned a value that cannot be loaded here: {type(error).__name__}: {error}",
                error_type=type(error).__name__,
            ) from error
        if message.kind is Kind.VALUE:
            return value
        failure: Failure = value
        failed, raised = self._failed(failure), _load_error(failure)
        if not failure.is_exception or raised is None:
            raise failed from raised
        _add_note(raised, f"It was raised on worker {self.index} ({self._settings.device}, pid {self.pid}).")
        raise raised from failed

    def _failed(self, failure: Failure) -> WorkerError:
        what = failure.what
        if failure.exit_code is not None:
            self.end()
            what = f"{describe_exit(failure.exit_code)}: it {what}"
        return self._error(
            what,
            WorkerError if failure.exit_code is None else WorkerDiedError,
            error_type=failure.error_type,
            text=failure.traceback_text,
            exit_code=failure.exit_code,
        )

    def died(self) -> WorkerError:
        """Return the error for a worker that ended by itself, or hung up; it is ended and closed."""
        ended_itself = self.has_ended(timing.DEVICE_WORKER_END)
        text = self.end()
        what = describe_exit(self.exit_code) if ended_itself else "closed its connection and was killed"
        hint = "Look whether memory ran out (dmesg). " if ended_itself and self.exit_code == -signal.SIGKILL else ""
        what = f"{what}. {hint}The next call starts a new one."
        return self._error(what, WorkerDiedError, text=text, exit_code=self.exit_code)

    def too_late(self, timeout: float) -> WorkerError:
        """Return the error for a worker that had no answer within the seconds given; it is ended and closed."""
        self.request_stacks()
        self.has_ended(timing.DEVICE_WORKER_END)
        text = self.end()
        what = f"did not answer within {timeout:g} s and was ended. Raise timeout=, or see below where it was."
        return self._error(what, WorkerDiedError, text=text, exit_code=self.exit_code)

    def end(self) -> str:
        """End it, wait until it is gone, close it, and return the stacks that it wrote."""
        self.kill()
        self.has_ended(timing.WORKER_END)
        text = self.read_stacks()
        self.close()
        return text

    def close(self) -> None:
        self.is_busy = False
        self.connection.close()
        super().close()

    @property
    def index(self) -> int:
        return self._settings.index

    @property
    def is_gone(self) -> bool:
        """Whether it can get no more tasks."""
        return self.is_closed or is_readable(self.connection, self.life)

    @property
    def is_closed(self) -> bool:
        return self.connection.fileno() == -1

    def _error(
        self,
        what: str,
        kind: type[WorkerError] = WorkerError,
        *,
        error_type: str = "",
        text: str = "",
        exit_code: int | None = None,
    ) -> WorkerError:
        message = f"worker {self.index} ({self._settings.device}, pid {self.pid}) {printable(what)}"
        if text:
            message += f"\n\nIts traceback:\n{printable_lines(text)}"
        return kind(
            message,
            device=self._settings.device,
            index=self.index,
            pid=self.pid,
            exit_code=exit_code,
            error_type=error_type,
            traceback_text=text,
        )


def _add_note(error: BaseException, text: str) -> None:
    """Add a line to what is shown of an exception, where the exception lets it."""
    with contextlib.suppress(AttributeError):  # a frozen dataclass takes none
        error.add_note(text)


def _load_error(failure: Failure) -> BaseException | None:
    if failure.error is None:
        return None
    try:
        error = pickle.loads(failure.error)  # noqa: S301 - written by a process of ours
    except Exception:  # noqa: BLE001 - its class may not be importable here, or raise anything; its text has arrived
        return None
    return error if isinstance(error, BaseException) else None
