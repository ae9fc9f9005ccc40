"""One worker as seen from the program."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import select
import signal
import socket
from contextlib import ExitStack

from distman.errors import WorkerError
from distman.executor._buffer_pool import ProgramSlots
from distman.executor._channel import Kind, Message, open_line, receive, send
from distman.executor._launch import ServerProcess
from distman.executor._payload import Parcel, unpack
from distman.executor._server import PID, SHOW_STACKS, STATUS
from distman.executor._worker import Failure, Settings

_START_SECONDS = 300.0
_GRACE_SECONDS = 2.0
_END_SECONDS = 30.0  # the kernel may keep a killed process that long, in a driver's call
_STACK_BYTES = 100_000


class Worker:
    """A worker process, for one task at a time.

    Args:
        server: Forks it.
        settings: Who it is.

    Attributes:
        line: Readable when it has answered or ended.
        life: Readable when it has ended.
        is_busy: Whether it has a task and has not answered.
    """

    def __init__(self, server: ServerProcess, settings: Settings) -> None:
        self._settings = settings
        self._slots = ProgramSlots()
        self._pid = 0
        self.is_busy = False
        with ExitStack() as undo:
            self.line, line = open_line()
            self.life, life = open_line()
            self._stacks = os.memfd_create("distman-stacks")
            undo.callback(self.close)
            message = json.dumps(dataclasses.asdict(settings)).encode()
            with line, life, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(server.control, [message], [line.fileno(), life.fileno(), self._stacks])
            self._await_start()
            undo.pop_all()

    def _await_start(self) -> None:
        data = b""
        self.life.settimeout(_START_SECONDS)
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            data = self.life.recv(PID.size)
        self.life.settimeout(None)
        if not data:
            raise self._error("must start, got no sign of life. What its server wrote to standard error says why.")
        (self._pid,) = PID.unpack(data)

    def send(self, parcel: Parcel, region_bytes: int, descriptor: int | None) -> None:
        """Give it a task.

        Args:
            parcel: The packed task.
            region_bytes: Size of the shared memory in which it lies, 0 for an inline parcel.
            descriptor: That memory.

        Raises:
            WorkerError: It has ended.
        """
        free_slots = self._slots.take_freed()
        self.is_busy = True
        try:
            send(self.line, Kind.TASK, parcel, region_bytes, descriptor, free_slots=free_slots)
        except (BrokenPipeError, ConnectionResetError):
            raise self.died() from None

    def answer(self) -> object:
        """Return what the function returned there.

        There must be an answer, or the worker must have ended.

        Raises:
            WorkerError: The function raised, or the worker ended; then the worker is closed.
        """
        message = receive(self.line, waits=False)
        if message is None:
            raise self.died()
        self.is_busy = False
        try:
            value = self._open(message)
        except Exception as error:
            raise self._error(
                f"returned a value that cannot be loaded here: {type(error).__name__}: {error}",
                error_type=type(error).__name__,
            ) from error
        if message.kind is Kind.VALUE:
            return value
        if not isinstance(value, Failure):
            raise TypeError(f"the answer must be a Failure, got {type(value).__name__}. This is a defect of distman.")
        raise self._failed(value) from _load_error(value)

    def _open(self, message: Message) -> object:
        if not message.region_bytes:
            return message.load_inline()
        return unpack(self._slots.open(message), message.stream_bytes, message.num_buffers)

    def _failed(self, failure: Failure) -> WorkerError:
        what = failure.what
        if failure.exit_code is not None:
            self.end()
            what = f"ended with {_describe_end(failure.exit_code)}: it {what}"
        return self._error(
            what, error_type=failure.error_type, text=failure.traceback_text, exit_code=failure.exit_code
        )

    def died(self) -> WorkerError:
        """Return the error for a worker that ended by itself, or hung up; it is closed.

        Blocks until it is gone.
        """
        ended_itself = self._has_ended_within(_GRACE_SECONDS)
        exit_code = self._force_end()
        text = self._read_stacks()
        self.close()
        end = _describe_end(exit_code) if ended_itself else "a closed connection"
        hint = "Look whether memory ran out (dmesg). " if exit_code == -signal.SIGKILL and ended_itself else ""
        what = f"must live until its function returns, got {end}. {hint}The next call starts a new one."
        return self._error(what, text=text, exit_code=exit_code)

    def too_late(self, timeout: float) -> WorkerError:
        """Return the error for a worker that has no answer in time; it is ended.

        Blocks until it is gone.

        Args:
            timeout: The seconds it had.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.life.send(SHOW_STACKS)
        self._has_ended_within(_GRACE_SECONDS)
        exit_code = self._force_end()
        text = self._read_stacks()
        self.close()
        what = (
            f"must answer within {timeout:g} s, got no answer; it was ended ({_describe_end(exit_code)}). "
            "Raise timeout=, or see below where it was."
        )
        return self._error(what, text=text, exit_code=exit_code)

    def _has_ended_within(self, seconds: float) -> bool:
        return _is_readable(self.life, timeout=seconds)

    def _force_end(self) -> int | None:
        """End it if it lives, and return how it ended; None if its server does not say."""
        self.kill()
        self.life.settimeout(_END_SECONDS)
        try:
            data = self.life.recv(STATUS.size)
        except (ConnectionResetError, TimeoutError):
            data = b""
        return int(STATUS.unpack(data)[0]) if data else None

    def kill(self) -> None:
        """Have it ended, with the processes that it started."""
        with contextlib.suppress(OSError):  # it has ended already
            self.life.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End it now.

        Blocks until it is gone.
        """
        self._force_end()
        self.close()

    def close(self) -> None:
        """Close this side's ends, which ends the worker."""
        self.is_busy = False
        self.line.close()
        self.life.close()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1

    @property
    def index(self) -> int:
        """Its place among the devices."""
        return self._settings.index

    @property
    def has_ended(self) -> bool:
        """Whether it can get no more tasks."""
        return self.line.fileno() == -1 or _is_readable(self.line, self.life)

    def _read_stacks(self) -> str:
        return os.pread(self._stacks, _STACK_BYTES, 0).decode(errors="backslashreplace")

    def _error(self, what: str, *, error_type: str = "", text: str = "", exit_code: int | None = None) -> WorkerError:
        settings = self._settings
        message = f"worker {settings.index} ({settings.device}, pid {self._pid}) {what}"
        if text:
            message += f"\n\nIts traceback:\n{text.rstrip()}"
        return WorkerError(
            message,
            device=settings.device,
            index=settings.index,
            pid=self._pid,
            exit_code=exit_code,
            error_type=error_type,
            traceback_text=text,
        )


def _is_readable(*lines: socket.socket, timeout: float = 0) -> bool:
    poller = select.poll()
    for line in lines:
        poller.register(line, select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def _load_error(failure: Failure) -> BaseException | None:
    if failure.error is None:
        return None
    try:
        error = pickle.loads(failure.error)  # noqa: S301 - written by a process of ours
    except Exception:  # noqa: BLE001 - its class may not be importable here, or raise anything; its text has arrived
        return None
    return error if isinstance(error, BaseException) else None


def _describe_end(exit_code: int | None) -> str:
    """Return in words how a process ended: its exit code, or the name of the signal."""
    if exit_code is None:
        return "an end of which its server does not know"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
