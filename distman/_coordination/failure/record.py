"""What the ranks tell each other of one that failed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import traceback
from typing import TYPE_CHECKING, Protocol

from distman._base import timing
from distman._base.text import shortened
from distman._coordination import protocol
from distman._coordination.failure.short_traceback import short_traceback
from distman._coordination.messages import claim, decode, encode
from distman._coordination.timeouts import result_within
from distman.errors import JobFailed, RankFailedError

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


DIED = "died"
EXITED = "exited"
LEFT = "left"
SILENT = "silent"


_MAX_TEXT = 10_000  # characters: a screen or two, which every rank prints
_MAX_TRACEBACK = 100_000  # characters: more than any honest stack, less than one message to the store takes


class Place(Protocol):
    """Where a rank runs: its host's name, and its process id there."""

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Here:
    """This process, as the place of a rank that has not joined yet."""

    rank: int
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)


@dataclasses.dataclass(frozen=True)
class FailureRecord:
    """What is said of a rank that failed; the fields are those of ``JobFailed`` and ``RankFailedError``."""

    rank: int
    host: str
    pid: int
    error_type: str
    error_text: str
    traceback_text: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureRecord:
        """Return the record of an exception that this process raised; of another rank's failure, that one's."""
        if issubclass(type(error), (JobFailed, RankFailedError)):
            with contextlib.suppress(AttributeError):  # a program's subclass may lack what it is to hold
                known = cls(**{field.name: getattr(error, field.name) for field in dataclasses.fields(cls)})
                return known if known.rank >= 0 else dataclasses.replace(known, rank=rank)
        place = rank, socket.gethostname(), os.getpid()
        if isinstance(error, SystemExit) and isinstance(error.__context__, Exception) and _exit_code(error):
            error = error.__context__  # an error in hand is the reason
        if isinstance(error, SystemExit):
            return cls(*place, EXITED, _text_of_exit(error))
        name, text = type(error).__name__, result_within(lambda: _text_of(error), timing.ERROR_TEXT)
        trace = result_within(lambda: _traceback_of(error), timing.ERROR_TEXT) if text is not None else None
        text = f"(its __str__ took more than {timing.ERROR_TEXT:g} s)" if text is None else text
        trace = f"{name}\n" if trace is None else trace
        return cls(*place, name, shortened(text, _MAX_TEXT), shortened(trace, _MAX_TRACEBACK))

    @classmethod
    def about(cls, place: Place, error_type: str, text: str) -> FailureRecord:
        """Return the record of a rank that told of no error itself."""
        return cls(place.rank, place.host, place.pid, error_type, text)

    @classmethod
    def died(cls, place: Place) -> FailureRecord:
        text = (
            "died: its connection broke. The launcher's output names the signal; the kernel log of the host says "
            "whether memory ran out."
        )
        return cls.about(place, DIED, text)

    @classmethod
    def left(cls, place: Place, awaited_at: str) -> FailureRecord:
        text = (
            f"left the job before it came to {awaited_at}. Its program ended, by sys.exit() perhaps, or called "
            "cleanup(): let all ranks take the same way."
        )
        return cls.about(place, LEFT, text)

    @classmethod
    def silent(cls, place: Place, seconds: float, *, last_seen: str = "") -> FailureRecord:
        text = (
            f"has been silent for {seconds:.0f} s{f', last seen {last_seen}' if last_seen else ''}: it is stopped, or "
            "native code is holding the GIL, or its host is cut off. DISTMAN_SILENCE_TIMEOUT is the limit."
        )
        return cls.about(place, SILENT, text)

    @classmethod
    def unreachable(cls, place: Place, seconds: float, *, role: str = "") -> FailureRecord:
        text = (
            f"{role}is on a host that has not answered for {seconds:.0f} s: that host, or the one that says so, has "
            "lost power or its network. See whether both are up."
        )
        return cls.about(place, SILENT, text)

    @classmethod
    def read(cls, store: TorchStore) -> FailureRecord | None:
        """Return the job's first record; None where there is none."""
        if not store.check([protocol.FAILURE]):
            return None
        return cls.decoded(store.get(protocol.FAILURE))

    def publish(self, store: TorchStore) -> FailureRecord:
        """Make this the job's record unless there is one, and return the one there is."""
        return claim(store, protocol.FAILURE, encode(self), type(self).decoded)

    @classmethod
    def decoded(cls, data: bytes, what: str = "the failure in the job's store") -> FailureRecord:
        return decode(data, cls, what)

    def is_of(self, error: BaseException) -> bool:
        """Return whether an error of the rank that failed may be the one that is on record."""
        if self.error_type != EXITED:
            return type(error).__name__ == self.error_type
        if not isinstance(error, SystemExit) or isinstance(error, JobFailed):
            return False
        return _exit_code(error) != 0 and self.error_text == _text_of_exit(error)

    def is_told_by(self, error: BaseException) -> bool:
        """Return whether an error, which may be any that a program raised, tells the other ranks' failure on record."""
        return issubclass(type(error), JobFailed) and vars(self).items() <= vars(error).items()

    @property
    def headline(self) -> str:
        return str(self.to_failure()).partition("\n")[0]

    def to_failure(self) -> JobFailed:
        """Return what the other ranks raise if the job has failed by it."""
        return JobFailed(**dataclasses.asdict(self))

    def to_error(self) -> JobFailed | RankFailedError:
        """Return what the other ranks raise that wait for work of this one: it is gone, or that work failed."""
        is_gone = self.error_type in (DIED, EXITED, LEFT, SILENT)
        return self.to_failure() if is_gone else RankFailedError(**dataclasses.asdict(self))


def _exit_code(error: SystemExit) -> int:
    return int(error.code) if isinstance(error.code, int) else int(error.code is not None)


def _text_of_exit(error: SystemExit) -> str:
    text = f"ended with exit code {_exit_code(error)}, by sys.exit() or SystemExit"
    return f"{text}: {shortened(error.code, _MAX_TEXT)}" if isinstance(error.code, str) else f"{text}."


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - a program's exception may raise anything instead of its text
        return f"(its __str__ raised {type(broken).__name__})"


def _traceback_of(error: BaseException) -> str:
    """Return the traceback without this package's lines, or what can be had of it: a cause may raise anything too."""
    try:
        return short_traceback(error) or "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001 - the same
        without = f"Its chained errors are left out: to show them raised {type(broken).__name__}."
    try:
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{without}\nTraceback (most recent call last):\n{frames}{type(error).__name__}: {_text_of(error)}\n"
    except Exception:  # noqa: BLE001 - memory is out, say
        return f"{type(error).__name__}\n"
