"""The life of a worker: one task after another, until the program hangs up."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import numpy as np
import torch

from distman.executor._buffer_pool import WorkerSlots
from distman.executor._channel import NO_SLOT, Kind, Message, receive, send
from distman.executor._moving import as_cpu
from distman.executor._payload import Parcel, pack, unpack
from distman.executor._shared_memory import create_region, map_region

# It writes the stacks and ends the process, without a core file; no program uses it.
STACK_SIGNAL = int(signal.SIGRTMAX) - 2
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Settings:
    """What a worker is told at its start.

    Attributes:
        index: Its place among the devices.
        device: Its device.
        num_threads: How many threads torch may use there.
        seed: Of its random generators.
    """

    index: int
    device: str
    num_threads: int
    seed: int


@dataclass(frozen=True)
class Task:
    """What a worker calls.

    Attributes:
        function: The function.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
        device_place: ``"first"``, ``"keyword"`` or ``""`` for a function that takes no device.
    """

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    device_place: str


@dataclass(frozen=True)
class Failure:
    """What went wrong in a worker that lives, or leaves by its own decision.

    Attributes:
        what: Such as ``"raised ValueError: no"``.
        error_type: Name of the type of the exception.
        traceback_text: Its traceback.
        error: The exception, pickled; None if it cannot be.
        exit_code: The code with which the worker leaves, None if it stays.
    """

    what: str
    error_type: str
    traceback_text: str
    error: bytes | None = None
    exit_code: int | None = None


def serve(line: socket.socket, stacks: int, settings: Settings) -> None:
    """Run the tasks that come over the line until it closes.

    Blocks.

    Args:
        line: To the program.
        stacks: File descriptor to which all stacks are written when the process crashes or is asked for them.
        settings: Who this worker is.
    """
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=True)
    if torch.get_num_threads() != settings.num_threads:  # the call itself starts threads, even if nothing changes
        torch.set_num_threads(settings.num_threads)
    _seed(settings.seed)
    slots = WorkerSlots()
    while (message := receive(line)) is not None:
        slots.release(message.free_slots)
        exit_code = _answer(line, message, slots, torch.device(settings.device))
        if exit_code is not None:
            os._exit(exit_code)
        del message


def _seed(seed: int) -> None:
    """Give each device its own random numbers, the same in every run of the program."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _answer(line: socket.socket, message: Message, slots: WorkerSlots, device: torch.device) -> int | None:
    kind, parcel, exit_code = _perform(message, device)
    _flush()
    try:
        _send(line, kind, parcel, slots)
    except (MemoryError, OSError, RuntimeError) as error:  # there is no room for a copy
        send(line, Kind.FAILURE, pack(_describe(error, "could not send its result: ")))
    return exit_code


def _send(line: socket.socket, kind: Kind, parcel: Parcel, slots: WorkerSlots) -> None:
    """Send a parcel: in the message, in a resident region, or in one of its own."""
    if parcel.is_inline:
        send(line, kind, parcel)
        return
    region = slots.take(parcel.total_bytes)
    if region is None:
        _send_once(line, kind, parcel)
        return
    parcel.write(region.memory)
    send(line, kind, parcel, region_bytes=region.size, descriptor=region.news, slot=region.slot)
    region.was_sent()


def _send_once(line: socket.socket, kind: Kind, parcel: Parcel) -> None:
    size = parcel.total_bytes
    descriptor = create_region(size)
    try:
        parcel.write(map_region(descriptor, size))
        send(line, kind, parcel, region_bytes=size, descriptor=descriptor, slot=NO_SLOT)
    finally:
        os.close(descriptor)


def _perform(message: Message, device: torch.device) -> tuple[Kind, Parcel, int | None]:
    """Run one task; whatever it does is an answer."""
    stage = "could not load its task: "
    try:
        task = _load(message)
        stage = "raised "
        value = as_cpu(_call(task, device))
        stage = "returned a value that cannot be pickled: "
        return Kind.VALUE, pack(value), None
    except BaseException as error:  # noqa: BLE001 - the program is told, and decides
        failure = _describe(error, stage)
        return Kind.FAILURE, pack(failure), failure.exit_code


def _load(message: Message) -> Task:
    with message.new_region() as descriptor:
        if descriptor is None:
            task: Any = message.load_inline()
        else:
            memory = map_region(descriptor, message.region_bytes, is_private=True).data
            task = unpack(memory, message.stream_bytes, message.num_buffers)
    if not isinstance(task, Task):
        raise TypeError(f"the task must be a Task, got {type(task).__name__}. This is a defect of distman.")
    return task


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
    exit_code = _exit_code(error) if isinstance(error, SystemExit) else None
    if exit_code is not None:
        stage = "called sys.exit: "
    return Failure(stage + headline, type(error).__name__, text, _dump(error), exit_code)


def _without_own_frames(shown: TracebackType | None) -> TracebackType | None:
    own = Path(__file__).parent
    while shown is not None and Path(shown.tb_frame.f_code.co_filename).parent == own:
        shown = shown.tb_next
    return shown


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _dump(error: BaseException) -> bytes | None:
    """Return the exception pickled, if it survives the journey."""
    try:
        data: bytes = cloudpickle.dumps(error)
        loaded = cloudpickle.loads(data)
    except Exception:  # noqa: BLE001 - pickling runs code of the exception's class, which may raise anything
        return None
    return data if type(loaded) is type(error) else None


def _flush() -> None:
    """Write out what was printed: the worker may be ended at any time."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # closed by the function, or none at all
            stream.flush()
    _LIBC.fflush(None)
