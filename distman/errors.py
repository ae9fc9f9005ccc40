"""The errors of distman.

::

    DistmanError (RuntimeError)
     ├── NotInitializedError      the manager is asked before initialize()
     ├── LaunchEnvironmentError   variables missing, not numbers, or contradicting each other
     ├── RendezvousError          ranks missing, double, unlike, or the address not reachable
     ├── UndefinedGroupError      no group or mesh axis of that name
     ├── PlanMismatchError        ranks ask for different groups, collectives, keys or shapes
     ├── RankFailedError          another rank raised, died or left; carries rank, host, type, text, traceback
     ├── BarrierTimeoutError      names the ranks that did not come to a barrier
     ├── CheckpointError          a checkpoint is damaged, is none at all, or holds code; or a save failed
     ├── NonFiniteLossError       the loss of a training is NaN or infinite on some rank
     └── WorkerError              a task of a ParallelExecutor has no answer, and no exception that could be sent
          └── WorkerDiedError     its worker died, was too late, or did not start; also a BrokenExecutor

Wrong arguments are ``ValueError`` or ``TypeError``; their messages read
``<name> must <condition>, got <value> [from <where>]. <What to do>.`` Messages of events read
``<What> failed: <reason>. <What to do>.``
"""

from __future__ import annotations

import datetime
import difflib
import functools
import reprlib
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import BrokenExecutor
from numbers import Real

from distman._text import printable, printable_lines

__all__ = [
    "BarrierTimeoutError",
    "CheckpointError",
    "DistmanError",
    "LaunchEnvironmentError",
    "NonFiniteLossError",
    "NotInitializedError",
    "PlanMismatchError",
    "RankFailedError",
    "RendezvousError",
    "UndefinedGroupError",
    "WorkerDiedError",
    "WorkerError",
    "check_options",
    "check_seconds",
    "undefined_group",
]


class DistmanError(RuntimeError):
    """Base of every error that distman raises on its own account."""


class NotInitializedError(DistmanError):
    """The manager was asked before ``DistributedManager.initialize()``, or after ``cleanup()``."""


class LaunchEnvironmentError(DistmanError):
    """Variables of a launcher are missing, not numbers, or contradict each other."""


class RendezvousError(DistmanError):
    """The ranks of the job could not be brought together."""


class UndefinedGroupError(DistmanError):
    """There is no group, mesh axis or node of that name."""


class PlanMismatchError(DistmanError):
    """The ranks ask for different groups, or come to a collective with different operations, keys or shapes."""


class RankFailedError(DistmanError):
    """Another rank raised, or ended without a word.

    Attributes:
        rank: The rank that failed, in the world.
        host: Its host name.
        pid: Its process id on that host.
        error_type: Name of the type that was raised there, such as ``"ValueError"``; of a rank that did not raise,
            ``"died"``, ``"left"`` or ``"silent"``.
        error_text: Text of that error, or what is known; as that rank gave it, while the message of this error escapes
            control characters and ends of lines.
        traceback_text: The traceback as that rank printed it; empty if it did not raise.
    """

    def __init__(
        self, *, rank: int, host: str, pid: int, error_type: str, error_text: str, traceback_text: str
    ) -> None:
        self.rank = rank
        self.host = host
        self.pid = pid
        self.error_type = error_type
        self.error_text = error_text
        self.traceback_text = traceback_text
        who, text = printable(f"rank {rank} ({host}, pid {pid})"), printable(error_text)
        super().__init__(
            f"{who} raised {printable(error_type)}: {text}\n\nIts traceback:\n{printable_lines(traceback_text)}"
            if traceback_text
            else f"{who}{text if text.startswith(',') else f' {text}'}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        names = ("rank", "host", "pid", "error_type", "error_text", "traceback_text")
        return functools.partial(type(self), **{name: getattr(self, name) for name in names}), ()


class BarrierTimeoutError(DistmanError):
    """Ranks did not come to a barrier in time."""


class CheckpointError(DistmanError):
    """A checkpoint is damaged, is none at all, or holds code; or a save in the background failed."""


class NonFiniteLossError(DistmanError):
    """The loss of a training, or its gradient, is NaN or infinite on some rank."""


class WorkerError(DistmanError):
    """A worker of a ``ParallelExecutor`` died, ran out of time, or has an answer that cannot be sent.

    It is also the ``__cause__`` of an exception that the function raised, and says where that was.

    Attributes:
        device: The worker's device, such as ``"cuda:1"``.
        index: The worker's place among the devices.
        pid: Its process id.
        exit_code: Its exit code, minus the number of the signal that ended it, or None while it lives.
        error_type: Name of the type of the exception raised there, such as ``"ValueError"``; may be empty.
        traceback_text: The traceback as the worker saw it, or the stacks of its threads; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        device: str = "",
        index: int = -1,
        pid: int = 0,
        exit_code: int | None = None,
        error_type: str = "",
        traceback_text: str = "",
    ) -> None:
        self.device = device
        self.index = index
        self.pid = pid
        self.exit_code = exit_code
        self.error_type = error_type
        self.traceback_text = traceback_text
        super().__init__(message)


class WorkerDiedError(WorkerError, BrokenExecutor):
    """A worker of a ``ParallelExecutor`` died, was too late, or did not start.

    The next call starts a new one.
    """


def check_options(options: Mapping[str, object], known: Iterable[str], method: str) -> None:
    """Refuse options that a method does not take, with the name that was meant.

    Local.

    Args:
        options: Names and values that were given.
        known: The names there are.
        method: What the program called, such as ``"wrap_ddp"``.

    Raises:
        TypeError: A name is unknown.
    """
    names = sorted(known)
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(names)}."
            raise TypeError(f"{name} must be an option that {method}() takes, got {name}={reprlib.repr(value)}. {hint}")


def check_seconds(name: str, value: object, *, below: float | None = None) -> float:
    """Return a duration in seconds.

    Local.

    Args:
        name: Name of the argument.
        value: A number of seconds, or a timedelta.
        below: What the number must be below; None takes what Python can wait for, some 292 years.

    Raises:
        TypeError: It is neither.
        ValueError: It is not positive, or too large.
    """
    number = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, got {value!r}. Pass 300 for five minutes.")
    seconds = float(number)
    if not 0 < seconds < (below or threading.TIMEOUT_MAX):
        most = f" below {below:,.0f}" if below is not None else ""
        raise ValueError(
            f"{name} must be a positive number of seconds{most}, got {value} from the call. Leave it out for the "
            "default."
        )
    return seconds


def undefined_group(name: str, known: Iterable[str], what: str) -> UndefinedGroupError:
    """Return the error for a name that means nothing, with the names that do.

    Local.

    Args:
        name: The name that was asked for.
        known: The names there are.
        what: What the name should have been, such as ``"a group"``.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Create it first, or correct the name."
    return UndefinedGroupError(f"{name!r} must be {what}, known are {', '.join(map(repr, names)) or 'none'}. {hint}")
