"""The workers of an executor: started when needed, replaced when they have ended."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from distman.errors import WorkerError
from distman.executor._collect import collect
from distman.executor._handle import Worker
from distman.executor._launch import ServerProcess
from distman.executor._payload import Parcel, pack
from distman.executor._shared_memory import create_region, map_region
from distman.executor._worker import Settings, Task


class Pool:
    """One worker for each device; calls from several threads take turns.

    Args:
        devices: The devices, in order.
        timeout: Seconds that a call may take, None for no limit.

    Attributes:
        pid: The process that may use it.
    """

    def __init__(self, devices: Sequence[torch.device], timeout: float | None) -> None:
        self.pid = os.getpid()
        self._devices = devices
        self._timeout = timeout
        self._server: ServerProcess | None = None
        self._server_lock = threading.Lock()
        self._locks = [threading.Lock() for _ in devices]
        self._workers: list[Worker | None] = [None] * len(devices)
        self._num_threads = max(1, torch.get_num_threads() // len(devices))
        self._seed = torch.initial_seed()

    def call(self, task: Task, indices: Sequence[int]) -> list[object]:
        """Return what the function returns on each of these workers, in this order.

        Blocks.

        Args:
            task: What to call.
            indices: Places of workers, ascending.

        Raises:
            TypeError: The task cannot be pickled.
            WorkerError: A worker failed; of several the first one in time.
        """
        parcel = _pack(task)
        with ExitStack() as stack:
            for index in indices:
                stack.enter_context(self._locks[index])
            workers: list[Worker] = []
            stack.callback(_end_busy, workers)
            for index in indices:
                workers.append(self._worker(index))  # noqa: PERF401 - known to the callback as soon as it is there
            with _laid_out(parcel) as (region_bytes, descriptor):
                for worker in workers:
                    worker.send(parcel, region_bytes, descriptor)
            return collect(workers, self._timeout)

    def _worker(self, index: int) -> Worker:
        worker = self._workers[index]
        if worker is not None and worker.has_ended:
            worker.close()
            worker = None
        if worker is None:
            worker = self._workers[index] = self._start(index)
        return worker

    def _start(self, index: int) -> Worker:
        device = self._devices[index]
        settings = Settings(index, str(device), self._num_threads, (self._seed + index) % 2**63)
        with self._server_lock:
            is_new = self._server is None
            try:
                return Worker(self._open_server(), settings)
            except WorkerError:
                if is_new:
                    raise
            # The server was killed a moment ago, and its lines close one after the other.
            self._close_server()
            return Worker(self._open_server(), settings)

    def open(self) -> None:
        """Start the server, if there is none, as long as this program has perhaps a single thread."""
        with self._server_lock:
            self._open_server()

    def _open_server(self) -> ServerProcess:
        if self._server is not None and self._server.has_ended:
            self._close_server()
        if self._server is None:
            self._server = ServerProcess(needs_driver=any(device.type != "cpu" for device in self._devices))
        return self._server

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def terminate(self) -> None:
        """End the workers, whatever they do; calls that wait for them fail."""
        for worker in self._workers:
            if worker is not None:
                worker.kill()

    def close(self) -> None:
        """End all processes and close all files; a second call does nothing.

        Blocks until calls in progress and the processes have ended.
        """
        if self.pid != os.getpid():
            return  # the processes are those of the program that this one was forked from
        with ExitStack() as stack:
            for lock in (*self._locks, self._server_lock):
                stack.enter_context(lock)
            for worker in self._workers:
                if worker is not None:
                    worker.close()
            self._workers = [None] * len(self._devices)
            self._close_server()


def _end_busy(workers: Sequence[Worker]) -> None:
    for worker in workers:
        if worker.is_busy:
            worker.kill()
    for worker in workers:
        if worker.is_busy:
            worker.end()


def _pack(task: Task) -> Parcel:
    try:
        return pack(task)
    except Exception as error:
        raise TypeError(
            f"func and its arguments must be picklable, got {type(error).__name__}: {error}. "
            "Make what cannot be pickled inside the function, or pass plain values."
        ) from error


@contextlib.contextmanager
def _laid_out(parcel: Parcel) -> Iterator[tuple[int, int | None]]:
    """Write a large parcel once for all workers, and lend the memory's size and file descriptor."""
    if parcel.is_inline:
        yield 0, None
        return
    size = parcel.total_bytes
    descriptor = create_region(size)
    try:
        parcel.write(map_region(descriptor, size))
        yield size, descriptor
    finally:
        os.close(descriptor)
