"""What a worker of an executor does: one task after another, until the program hangs up."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import torch

from distman._base.seeds import seed_generators
from distman._workers.fork_server import STACK_SIGNAL, Work
from distman._workers.output import exit_code_of, flush_output, only_this_process
from distman.executor._moving import as_cpu
from distman.executor._payload import Kind, Message, Payload, pack, receive, send

ENTRY = f"{__name__}:prepare"
_RAISED = "raised "


@dataclass(frozen=True)
class Settings:
    index: int  # its place among the devices
    device: str
    num_threads: int  # how many torch may use there
    seed: int  # of its random generators


@dataclass(frozen=True)
class Task:
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    device_place: str  # "first", "keyword" or "" for a function that takes no device


@dataclass(frozen=True)
class Failure:
    """What went wrong in a worker that lives, or leaves by its own decision."""

    what: str  # such as "raised ValueError: no"
    error_type: str
    traceback_text: str
    is_exception: bool = False  # whether the function raised an ``Exception``, which is then the answer
    error: bytes | None = None  # the exception, pickled; None if it cannot be
    exit_code: int | None = None  # with which the worker leaves; None if it stays


@contextlib.contextmanager
def prepare() -> Iterator[Work]:
    yield _work


def _work(settings: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run the tasks that arrive over the connection until it closes; stacks are written on a crash or on request."""
    stacks, connection = descriptors
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=True)  # then the signal ends the process
    own = Settings(**settings)
    if torch.get_num_threads() != own.num_threads:  # the call itself starts threads, even if nothing changes
        torch.set_num_threads(own.num_threads)
    seed_generators(own.seed)
    with socket.socket(fileno=connection) as program, contextlib.suppress(ConnectionError):
        send(program, Kind.VALUE, pack(None), None)  # the time of the first task begins now
        while (message := receive(program)) is not None:
            exit_code = _answer(program, message, torch.device(own.device))
            if exit_code is not None:
                os._exit(exit_code)
            del message


def _answer(program: socket.socket, message: Message, device: torch.device) -> int | None:
    with only_this_process():  # what is pickled may fork as well
        kind, payload, exit_code = _perform(message, device)
    signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it has set must not go off in the next task
    flush_output()
    try:
        with payload.in_shared_memory() as descriptor:
            send(program, kind, payload, descriptor)
    except (MemoryError, OSError, RuntimeError) as error:  # there is no room for a copy
        send(program, Kind.FAILURE, pack(_describe(error, "could not send its result: ")), None)
    return exit_code


def _perform(message: Message, device: torch.device) -> tuple[Kind, Payload, int | None]:
    """Run one task; whatever it does is an answer."""
    stage = "could not load its task: "
    try:
        task: Task = message.contents(is_private=True)
        stage = _RAISED
        with only_this_process():
            value = _call(task, device)
        stage = "returned a value that cannot be pickled: "
        return Kind.VALUE, pack(as_cpu(value)), None
    except BaseException as error:  # noqa: BLE001 - the program decides what to do about it
        failure = _describe(error, stage)
        return Kind.FAILURE, pack(failure), failure.exit_code


def _call(task: Task, device: torch.device) -> object:
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    if task.device_place == "keyword":
        return task.function(*task.arguments, **{**task.keywords, "device": device})
    if task.device_place == "first":
        return task.function(device, *task.arguments, **task.keywords)
    return task.function(*task.arguments, **task.keywords)


def _describe(error: BaseException, stage: str) -> Failure:
    headline = "".join(traceback.format_exception_only(error)).strip()
    shown = _without_own_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, shown))
    exit_code = exit_code_of(error) if isinstance(error, SystemExit) else None
    if exit_code is not None:
        stage = "called sys.exit: "
    is_exception = stage == _RAISED and isinstance(error, Exception)
    return Failure(stage + headline, type(error).__name__, text, is_exception, _dump(error), exit_code)


def _without_own_frames(shown: TracebackType | None) -> TracebackType | None:
    own = Path(__file__).parent
    while shown is not None and Path(shown.tb_frame.f_code.co_filename).parent == own:
        shown = shown.tb_next
    return shown


def _dump(error: BaseException) -> bytes | None:
    """Return the exception pickled, if it can be loaded again."""
    try:
        data: bytes = cloudpickle.dumps(error)
        loaded = cloudpickle.loads(data)
    except Exception:  # noqa: BLE001 - pickling runs code of the exception's class, which may raise anything
        return None
    return data if type(loaded) is type(error) else None
