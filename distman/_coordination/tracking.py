"""Where in the user's program this process is: what it waits for, and what it must not do there."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from distman._process_state import puts_back
from distman.errors import DistmanError

if TYPE_CHECKING:
    from distman._coordination.monitor.mismatch import Call

_PACKAGE = f"{Path(__file__).parent.parent}/"

_waiting: dict[int, TrackedWait] = {}
"""What each thread waits for, by the thread's identifier."""

_region = threading.local()
_home: int | None = None
_last = ""


class TrackedWait:
    """For the length of a ``with`` block this thread waits for other ranks.

    Within another such block it changes nothing.

    Args:
        operation: What it waits in, such as ``all_gather_v``.
    """

    __slots__ = ("call", "is_outermost", "line", "mismatch", "note", "operation", "since", "thread")

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def __enter__(self) -> TrackedWait:
        self.thread = threading.get_ident()
        self.is_outermost = self.thread not in _waiting
        if self.is_outermost:
            self.line = _line_of_user(sys._getframe(1))
            self.since = time.monotonic()
            self.call: Call | None = None  # what it waits in now, of all that its operation does
            self.note = ""  # the collective and what must be equal on all ranks
            self.mismatch = ""  # why its call does not match those of the others
            _waiting[self.thread] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_outermost:
            global _last
            if _waiting.pop(self.thread, None) is not None:  # else all was forgotten meanwhile
                _last = f"after {self}"

    def __str__(self) -> str:
        """Return what and where, such as ``all_gather_v at train.py:31``."""
        return f"{self.operation} at {self.line[0]}:{self.line[1]}"


@dataclasses.dataclass(frozen=True)
class Restricted:
    """For the length of a ``with`` block only some ranks run here, so nothing may wait for all.

    Attributes:
        what: The region, such as ``on_rank(0) of save()``.
        ranks: The ranks that run in it.
    """

    what: str
    ranks: frozenset[int]

    def __enter__(self) -> Restricted:
        _region.stack = [*getattr(_region, "stack", ()), self]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _region.stack = getattr(_region, "stack", ())[:-1]


def restriction() -> Restricted | None:
    """Return the innermost restricted region that this thread is in, or None."""
    regions = getattr(_region, "stack", None)
    return regions[-1] if regions else None


def depth() -> int:
    """Return how many restricted regions this thread is in."""
    return len(getattr(_region, "stack", ()))


def enter_rank_process() -> None:
    """Let this process be the one of its rank; a process forked from it is not."""
    global _home
    _home = os.getpid()
    _waiting.clear()


def leave_rank_process() -> None:
    """Let this process be that of no rank any more."""
    global _home
    _home = None


@puts_back
def _forget() -> None:
    global _home, _last
    _home, _last = None, ""
    _waiting.clear()
    vars(_region).clear()


def is_child() -> bool:
    """Return whether this process was forked from a rank, as the workers of a data loader are.

    It shares connections with its parent, which must not be used from two sides.
    """
    return _home is not None and os.getpid() != _home


def check_all_run_here(ranks: Iterable[int]) -> None:
    """Check that this thread may wait for these ranks: that all of them run where it runs.

    Args:
        ranks: Ranks in the world.

    Raises:
        DistmanError: It is in a region that not all of them run through, or in a child of a rank.
    """
    if is_child():
        raise DistmanError(
            f"a call that waits for others must be made in the process of the rank, pid {_home}, got one at "
            f"{call_site()} in its child {os.getpid()}. Move it out of the data loader's worker."
        )
    region = restriction()
    if region is None or region.ranks.issuperset(ranks):
        return
    wait = _waiting.get(threading.get_ident())
    raise DistmanError(
        f"{wait.operation if wait else 'a call that waits for others'} must be called where all its ranks run, got a "
        f"call within {region.what} at {call_site()}. Move it out of there."
    )


def current_wait() -> TrackedWait | None:
    """Return what this thread waits for."""
    return _waiting.get(threading.get_ident())


def waits() -> list[TrackedWait]:
    """Return what the threads of this process wait for."""
    return list(_waiting.values())


def describe_here() -> str:
    """Return what this process is doing with respect to other ranks, in words."""
    now = [f"in {wait} for {time.monotonic() - wait.since:.0f} s" for wait in waits()]
    return ", ".join(now) or _last


def call_site() -> str:
    """Return file and line of the innermost call that is neither this package's own nor torch's."""
    name, line = _line_of_user(sys._getframe(1))
    return f"{name}:{line}"


def stacks() -> str:
    """Return the stack of every thread of this process but the calling one, the main thread's first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        lines = "".join(traceback.format_stack(frames[ident]))
        texts.append(f"thread {names.get(ident, ident)}\n{lines}")
    return "\n".join(texts)


def _line_of_user(frame: FrameType) -> tuple[str, int]:
    hidden = _hidden()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(hidden):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@functools.lru_cache(maxsize=1)
def _hidden() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_PACKAGE, f"{Path(torch).parent}/") if torch else (_PACKAGE,)
