"""What one test may change in a worker, and how it is put back before the next."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from distman._torch_internals import forget_layouts

_Restore = Callable[[], object]


@contextmanager
def preserved_state() -> Iterator[None]:
    """Put back, at the end, what tests commonly change in their process.

    Environment, current directory, search path, signal handlers and timers, hooks, logging levels and handlers,
    warnings filters, and torch's modes and defaults.
    """
    with warnings.catch_warnings(), ExitStack() as stack:
        for remember in _REMEMBER:
            stack.callback(remember())
        yield


def _environ() -> _Restore:
    before = dict(os.environ)

    def restore() -> None:
        os.environ.clear()
        os.environ.update(before)

    return restore


def _layouts() -> _Restore:
    return forget_layouts  # the next test may have this process as another rank


def _directory() -> _Restore:
    before = os.getcwd()  # noqa: PTH109 - a string, as os.chdir takes it
    return lambda: os.chdir(before)


def _search_path() -> _Restore:
    before, arguments = list(sys.path), list(sys.argv)

    def restore() -> None:
        sys.path[:] = before
        sys.argv[:] = arguments

    return restore


def _hooks() -> _Restore:
    before = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stdout, sys.stderr

    def restore() -> None:
        sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stdout, sys.stderr = before

    return restore


def _signals() -> _Restore:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    return restore


def _logging() -> _Restore:
    levels = {name: logger.level for name, logger in _loggers().items()}
    root = logging.getLogger()
    root_level, handlers, disabled = root.level, list(root.handlers), root.manager.disable

    def restore() -> None:
        root.setLevel(root_level)
        root.handlers[:] = handlers
        logging.disable(disabled)
        for name, logger in _loggers().items():
            logger.setLevel(levels.get(name, logging.NOTSET))

    return restore


def _loggers() -> dict[str, logging.Logger]:
    known = logging.getLogger().manager.loggerDict
    return {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}


def _torch_defaults() -> _Restore:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)

    return restore


def _torch_modes() -> _Restore:
    gradients, anomalies = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    deterministic = _deterministic()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark

    def restore() -> None:
        torch.set_grad_enabled(gradients)
        torch.autograd.set_detect_anomaly(anomalies)
        if _deterministic() != deterministic:  # the call imports the compiler, more than a second
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn

    return restore


def _deterministic() -> tuple[bool, bool]:
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns_only


_REMEMBER: tuple[Callable[[], _Restore], ...] = (
    _environ,
    _directory,
    _search_path,
    _hooks,
    _signals,
    _logging,
    _torch_defaults,
    _torch_modes,
    _layouts,
)
