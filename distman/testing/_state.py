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
from typing import Any

import torch

from distman._torch_internals import forget_layouts


@contextmanager
def preserved_state() -> Iterator[None]:
    """Put back, at the end, what tests commonly change in their process.

    Environment, current directory, search path, signal handlers and timers, hooks, logging levels and handlers,
    warnings filters, and torch's modes and defaults.
    """
    with warnings.catch_warnings(), ExitStack() as stack:
        stack.callback(forget_layouts)  # the next test may have this process as another rank
        for read, restore in _STATE:
            stack.callback(restore, read())
        for owner, name in _ATTRIBUTES:
            stack.callback(setattr, owner, name, getattr(owner, name))
        yield


def _set_environ(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_paths(before: tuple[list[str], list[str]]) -> None:
    sys.path[:], sys.argv[:] = before


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_handlers(before: dict[int, Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _levels() -> dict[logging.Logger, int]:
    known = logging.getLogger().manager.loggerDict.values()
    return {one: one.level for one in (logging.getLogger(), *known) if isinstance(one, logging.Logger)}


def _set_levels(before: dict[logging.Logger, int]) -> None:
    for logger, level in _levels().items():
        if level != before.get(logger, logging.NOTSET):  # to set it makes all loggers forget what they have worked out
            logger.setLevel(before.get(logger, logging.NOTSET))


def _set_log_handlers(before: list[logging.Handler]) -> None:
    logging.getLogger().handlers[:] = before


def _set_default_device(before: torch.device) -> None:
    if torch.get_default_device() != before:  # to set one, or none, costs every later call of torch something
        torch.set_default_device(before)


def _deterministic() -> tuple[bool, bool]:
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns_only


def _set_deterministic(before: tuple[bool, bool]) -> None:
    if _deterministic() != before:  # the call imports the compiler, more than a second
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# How each part of the state is read, and how it is put back.
_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(os.environ), _set_environ),
    (os.getcwd, os.chdir),
    (lambda: (list(sys.path), list(sys.argv)), _set_paths),
    (_handlers, _set_handlers),
    (_levels, _set_levels),
    (lambda: list(logging.getLogger().handlers), _set_log_handlers),
    (lambda: logging.getLogger().manager.disable, logging.disable),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_deterministic, _set_deterministic),
)
_ATTRIBUTES = (
    (sys, "excepthook"),
    (sys, "unraisablehook"),
    (threading, "excepthook"),
    (sys, "stdout"),
    (sys, "stderr"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "benchmark"),
)
