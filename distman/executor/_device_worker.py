"""One worker of an executor as seen from the program."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal

from distman._base import timing
from distman._base.text import printable, printable_lines
from distman._workers.output import describe_exit
from distman._workers.server_process import ServerProcess
from distman._workers.sockets import is_readable, socket_pair
from distman._workers.worker_process import WorkerProcess
from distman.errors import WorkerDiedError, WorkerError
from distman.executor._payload import Kind, Payload, receive, send
from distman.executor._task_loop import Failure, Settings


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
            value = message.load()
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
        add_note(raised, f"It was raised on worker {self.index} ({self._settings.device}, pid {self.pid}).")
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


def add_note(error: BaseException, text: str) -> None:
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
