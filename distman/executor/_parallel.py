"""The executor: a function on every device at once, or many calls shared out among the devices."""

from __future__ import annotations

import inspect
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from distman._base.arguments import check_seconds
from distman._job.device import resolve_device
from distman.executor._pool import DevicePool
from distman.executor._task_loop import Task

P = ParamSpec("P")
T = TypeVar("T")
_MOST_SECONDS = 2_000_000  # 23 days: poll counts milliseconds in 31 bits
_with_threads: weakref.WeakSet[ParallelExecutor] = weakref.WeakSet()


class ParallelExecutor(Executor):
    """One resident process for each device, started by the first call.

    It is a context manager and a ``concurrent.futures.Executor``, whose ``map`` shares the calls out among the devices;
    its ``chunksize`` changes nothing. With ``pass_device`` every function is given its
    device: as the first argument, or by keyword if it has a parameter ``device`` that is not its first, or takes
    nothing but keywords.

    Args:
        num_gpus: How many GPUs to use, from the first one on; None takes all, or one CPU worker where there is no GPU.
        pass_device: Whether functions take the device.
        devices: The devices instead, such as ``["cpu", "cpu"]``; one may be there several times.
        timeout: Seconds that a call may take on a worker, None for no limit.
        initializer: A function that every worker calls when it starts, with its device like any other. If it fails,
            so does the call that needs the worker, with :class:`~distman.errors.WorkerDiedError`.
        initargs: Its arguments after the device.

    Raises:
        TypeError: A device is neither a text nor a ``torch.device``, ``timeout`` is not a number of seconds, or
            ``initializer`` cannot be called.
        ValueError: There are not as many GPUs, ``devices`` is empty, both are given, or ``timeout`` is not a positive
            number below two million.

    Example:
        >>> def square(x):
        ...     return x**2
        >>> with ParallelExecutor(devices=["cpu", "cpu"], pass_device=False) as executor:
        ...     print(list(executor.map(square, [1, 2, 3])))
        [1, 4, 9]
    """

    def __init__(
        self,
        num_gpus: int | None = None,
        pass_device: bool = True,  # noqa: FBT001, FBT002 - a settled interface
        *,
        devices: Sequence[str | torch.device] | None = None,
        timeout: float | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] = (),
    ) -> None:
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a function, got {initializer!r}. Pass its arguments as initargs.")
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, below=_MOST_SECONDS)
        self.devices: tuple[torch.device, ...] = _choose_devices(num_gpus, devices)
        self._pass_device = pass_device
        self._timeout = timeout
        self._initializer, self._initargs = initializer, tuple(initargs)
        self._is_shut = False
        self._renew()

    def __reduce__(self) -> tuple[object, ...]:
        """Travel as an executor of the same devices, with workers of its own."""
        options: dict[str, Any] = {
            "pass_device": self._pass_device,
            "timeout": self._timeout,
            "initargs": self._initargs,
        }
        devices = [str(device) for device in self.devices]
        return partial(ParallelExecutor, devices=devices, initializer=self._initializer, **options), ()

    def _renew(self) -> None:
        """Begin with no workers: at first, and in a copy of the program made by a fork."""
        first = self._task(self._initializer, self._initargs, {}) if self._initializer is not None else None
        self._pool = DevicePool(self.devices, self._timeout, first)
        self._threads: ThreadPoolExecutor | None = None
        self._free: queue.LifoQueue[int] = queue.LifoQueue()  # the last one first: what is not needed does not start
        for index in reversed(range(len(self.devices))):
            self._free.put(index)
        self._changed = threading.Condition()
        self._num_calls = 0
        weakref.finalize(self, self._pool.close)

    def run(self, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Call the function on every device at once, and return the results in the order of the devices.

        Local. Blocks. Tensors come back on the CPU, detached.

        Args:
            func: The function; lambdas, closures and functions of a notebook will do.
            args: Its arguments after the device, the same on every device.
            kwargs: Its keyword arguments.

        Returns:
            What the function returned on each device.

        Raises:
            Exception: What the function raised, from a ``WorkerError`` that has its traceback. Of several workers,
                that of the first one to fail; what the others do is ended, and the next call works again.
            RuntimeError: The executor was shut down.
            TypeError: Function or arguments cannot be pickled, or ``kwargs`` has the device.
            WorkerDiedError: A worker died, by ``sys.exit`` too, was too late, or did not start.
            WorkerError: What the function returned or raised cannot be pickled, or is not an ``Exception``.

        Example:
            >>> def make(device, size):
            ...     return torch.ones(size, device=device)
            >>> with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
            ...     print(executor.run(make, size=2))
            [tensor([1., 1.]), tensor([1., 1.])]
        """
        self._begin()
        try:
            results: list[Any] = self._pool.call(self._task(func, args, kwargs), range(len(self.devices)))
        finally:
            self._end()
        return results

    def submit(self, fn: Callable[P, T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call the function on one device, whichever is free first.

        Local.

        Args:
            fn: The function.
            args: Its arguments after the device. They are pickled when a device is free.
            kwargs: Its keyword arguments.

        Returns:
            The future; its exceptions are those of ``run``.

        Raises:
            RuntimeError: The executor was shut down.

        Example:
            >>> with ParallelExecutor(devices=["cpu"], pass_device=False) as executor:
            ...     future = executor.submit(pow, 2, 10)
            ...     print(future.result())
            1024
        """
        self._begin()
        try:
            future: Future[Any] = self._open_threads().submit(self._call_here, fn, args, kwargs)
        except BaseException:
            self._end()
            raise
        future.add_done_callback(partial(_end_call, weakref.ref(self)))
        return future

    def _task(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
        place = _device_place(function) if self._pass_device else ""
        if place == "keyword" and "device" in kwargs:
            raise TypeError(
                f"device must be left to the executor, got {kwargs['device']!r}. Leave it out, or make the executor "
                "with pass_device=False."
            )
        return Task(function, args, kwargs, place)

    def _call_here(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._free.get()
        try:
            return self._pool.call(self._task(function, args, kwargs), [index])[0]
        finally:
            self._free.put(index)

    def _open_threads(self) -> ThreadPoolExecutor:
        """Return a thread for each worker."""
        with self._changed:
            if self._threads is None:
                self._pool.server.open()  # while this program has perhaps a single thread
                _with_threads.add(self)
                self._threads = ThreadPoolExecutor(len(self.devices), "ParallelExecutor")
            return self._threads

    def _begin(self) -> None:
        if self._pool.pid != os.getpid():
            self._renew()
        with self._changed:
            if self._is_shut:
                raise RuntimeError("the executor must be open, got a call after shutdown(). Make a new one.")
            self._num_calls += 1

    def _end(self) -> None:
        with self._changed:
            self._num_calls -= 1
            is_last = self._is_shut and not self._num_calls
            self._changed.notify_all()
        if is_last:
            self._pool.close()

    def shutdown(
        self,
        wait: bool = True,  # noqa: FBT001, FBT002 - the interface of concurrent.futures
        *,
        cancel_futures: bool = False,
    ) -> None:
        """End the workers when what was submitted is done, and free what they hold.

        Local. Blocks if ``wait``.

        Args:
            wait: Whether to return only when nothing of the executor is left.
            cancel_futures: Whether to drop what has not begun.

        Example:
            >>> executor = ParallelExecutor(devices=["cpu"], pass_device=False)
            >>> future = executor.submit(pow, 2, 10)
            >>> executor.shutdown()  # when that is done
            >>> future.result()
            1024
        """
        if self._pool.pid != os.getpid():
            self._renew()
        with self._changed:
            self._is_shut = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=cancel_futures)
        if wait:
            self._wait()
        if not self._num_calls:
            self._pool.close()
        if wait and self._threads is not None:
            self._threads.shutdown(wait=True)

    def _wait(self) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_calls)
        except BaseException:
            self._pool.terminate()
            raise

    def _terminate(self) -> None:
        """Drop what has not begun, and end what runs."""
        self.shutdown(wait=False, cancel_futures=True)
        self._pool.terminate()

    def __exit__(self, exc_type: object, exc_val: BaseException | None, exc_tb: object) -> Literal[False]:
        """Shut down. After Ctrl-C or ``sys.exit`` nothing is waited for: what runs is ended."""
        if exc_val is not None and not isinstance(exc_val, Exception):
            self._terminate()
        self.shutdown()
        return False


def _end_call(caller: weakref.ref[ParallelExecutor], _: Future[Any]) -> None:
    """Count a call as ended; its future, which may be kept for long, does not keep the executor."""
    executor = caller()
    if executor is not None:
        executor._end()


def _finish_or_terminate() -> None:
    """Finish what was submitted before the program ends, or end it where Ctrl-C ends the program, now or before.

    In an interactive session Ctrl-C ends no more than a call, and may be long ago.
    """
    executors = list(_with_threads)
    is_interrupted = not hasattr(sys, "ps1") and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    try:
        for executor in executors if not is_interrupted else ():
            executor._wait()
    except BaseException:
        is_interrupted = True
        raise
    finally:
        for executor in executors if is_interrupted else ():
            executor._terminate()


# Before the interpreter's end waits for the threads of concurrent.futures, and so for what they wait for, which Ctrl-C
# does not end; atexit runs after that.
threading._register_atexit(_finish_or_terminate)  # type: ignore[attr-defined]


def _choose_devices(num_gpus: int | None, devices: Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    if devices is None:
        return _choose_gpus(num_gpus)
    if num_gpus is not None:
        raise ValueError(f"devices must stand alone, got num_gpus={num_gpus!r} as well. Leave one of them out.")
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices must be a list with at least one device, got {devices!r}. Pass ['cpu', 'cpu'].")
    chosen = [resolve_device(device) for device in devices]
    return tuple(
        torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device for device in chosen
    )


def _choose_gpus(num_gpus: int | None) -> tuple[torch.device, ...]:
    kind, count = "cuda", torch.cuda.device_count()
    if not count:
        kind, count = "xpu", torch.xpu.device_count()
    if num_gpus is None:
        return tuple(torch.device(kind, index) for index in range(count)) or (torch.device("cpu"),)
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or not 1 <= num_gpus <= count:
        raise ValueError(
            f"num_gpus must be a number from 1 to the {count} GPUs that are visible, got {num_gpus!r}. "
            "Pass devices=['cpu', 'cpu'] for workers on the CPU."
        )
    return tuple(torch.device(kind, index) for index in range(num_gpus))


def _device_place(function: Callable[..., Any]) -> str:
    """Return how the function takes its device: ``"first"``, or ``"keyword"``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return "first"
    for place, parameter in enumerate(parameters):
        if parameter.name == "device" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return "first" if place == 0 and parameter.kind is parameter.POSITIONAL_OR_KEYWORD else "keyword"
    kinds = [parameter.kind for parameter in parameters]
    only_by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return "keyword" if inspect.Parameter.VAR_KEYWORD in kinds and kinds[0] in only_by_name else "first"
