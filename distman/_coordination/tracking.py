"""Where in the user's program this process is: what it waits for, and what it must not do there.

It waits for something in the store, or in a call of a group, in which its ranks wait for each other. Messages of unlike
calls have unlike tags, so they never meet, and both ranks wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Protocol

import torch.distributed as dist

from distman._base import timing
from distman._base.process_state import puts_back
from distman._coordination import step_times
from distman._coordination.failure.short_traceback import internal_folders, is_of_user
from distman._coordination.timeouts import is_idle, run_with_timeout
from distman._torch_internals import abort_backends, close_beside, close_connections
from distman.errors import DistmanError


class Members(Protocol):
    """The group that a call is made in; ``ranks`` are those of the world, and ``rank`` is this one's index there."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def process_group(self) -> dist.ProcessGroup | None: ...
    @property
    def exchanges(self) -> CallNumbers: ...


class CallNumbers:
    def __init__(self) -> None:
        self.last = -1

    def __next__(self) -> int:
        self.last += 1
        return self.last


@dataclasses.dataclass(eq=False)
class StoreWait:
    text: str  # the same on all ranks that wait for the same
    awaited: Callable[[], Sequence[int]]  # which ranks of the world have yet to bring it
    since: float = dataclasses.field(default_factory=time.monotonic)

    place = ("", 0)  # of no group
    label = ""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that it waits for, in the world."""
        return self.awaited()


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """What this rank waits in."""

    group: Members
    number: int  # in the group, the same on all members
    text: str  # what must be equal on all of them
    # Bytes to and from each rank of the group; None if it is an operation of the backend.
    pieces: tuple[Sequence[int], Sequence[int]] | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def place(self) -> tuple[str, int]:
        """The name of its process group, empty if that has gone, and the call's number in it."""
        process_group = self.group.process_group
        return (process_group.group_name if process_group is not None else "", self.number)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that make it, in the world."""
        return self.group.ranks

    @property
    def label(self) -> str:
        """The group, for messages."""
        return str(self.group.name or self.group.ranks)

    def interrupt(self) -> None:
        """Let the wait end with an error; connections are closed, else what it has sent would meet a later call."""
        end_waits(self.group)


def end_waits(group: Members) -> None:
    """End what ranks wait for in a group, which is good for nothing afterwards, see :meth:`Call.interrupt`."""
    process_group = group.process_group
    if process_group is not None:
        close_beside(process_group)  # at once: the next line may take seconds
        run_with_timeout(lambda: abort_backends(process_group), timing.ABORT_GROUPS)
        close_connections(process_group)


_waiting: dict[int, TrackedWait] = {}
"""What each thread waits for, by the thread's identifier."""

_home: int | None = None
_NOBODY = -1
"""Stands for the process of a rank that has left its job, while the program ends."""

_last = ""
_is_threaded = False


class _Regions(threading.local):
    """The restricted regions that each thread is in, the innermost last."""

    def __init__(self) -> None:
        self.inside: list[Restricted] = []


_regions = _Regions()


class TrackedWait:
    """For the length of the outermost such ``with`` block this thread waits for other ranks."""

    def __init__(self, operation: str, *, computes: bool = False) -> None:
        self.operation = operation  # such as ``all_gather_v``
        self.computes = computes  # mostly itself: its length does not say how long this rank waits for others

    def __enter__(self) -> TrackedWait:
        self.thread = threading.get_ident()
        self.is_outermost = self.thread not in _waiting
        if self.is_outermost:
            self.line = line_of(sys._getframe(1))
            self.since = time.monotonic()
            self.call: Call | None = None  # what it waits in now, of all that its operation does
            self.store_wait: StoreWait | None = None  # the same, where it waits for something in the store
            self.note = ""  # the collective and what must be equal on all ranks
            self.mismatch = ""  # why its call does not match those of the others
            self.refusal = ""  # that another rank has refused its call, and why
            self.is_of_program = _is_of_program(self.thread)
            _waiting[self.thread] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_outermost:
            global _last
            if not self.computes:
                step_times.current().count_wait(self.thread, time.monotonic() - self.since)
            if _waiting.pop(self.thread, None) is not None:  # else all was forgotten meanwhile
                _last = f"after {self}"

    def __str__(self) -> str:
        """Return what and where, such as ``all_gather_v at train.py:31``."""
        return f"{self.operation} at {self.line}"


@dataclasses.dataclass(eq=False)
class Restricted:
    """For the length of a ``with`` block only some ranks run in this thread."""

    what: str  # such as ``on_rank(0) of save()``
    ranks: frozenset[int]

    def __enter__(self) -> Restricted:
        _regions.inside.append(self)
        self._phase = step_times.current().enter(step_times.APART)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # all was forgotten meanwhile
            _regions.inside.remove(self)
        step_times.current().enter(self._phase)


def restriction() -> Restricted | None:
    return _regions.inside[-1] if _regions.inside else None


def depth() -> int:
    return len(_regions.inside)


def enter_rank_process() -> None:
    """Let this process be the one of its rank; a process forked from it is not."""
    global _home
    _home = os.getpid()
    _waiting.clear()


def leave_rank_process() -> None:
    """Let this process be that of no rank any more."""
    global _home
    _home = None


def end_rank_process() -> None:
    """Let the rank have no process any more: it has left its job, and only exit handlers still run."""
    global _home
    _home = _NOBODY


@puts_back
def _forget() -> None:
    global _home, _last, _is_threaded
    _home, _last, _is_threaded = None, "", False
    _waiting.clear()
    _regions.inside.clear()


def is_outside() -> bool:
    """Return whether this process speaks for no rank, though it knows one.

    It was forked from the rank, as the workers of a data loader are, and shares connections with its parent, which must
    not be used from two sides. Or the rank has left its job at the end of the program.
    """
    return _home is not None and os.getpid() != _home


def check_speaks_for_rank(what: str) -> None:
    """Check that this process may do what concerns the other ranks."""
    if not is_outside():
        return
    if _home == _NOBODY:
        raise DistmanError(
            f"{what} must be made before the rank leaves its job at the end of the program, got one at {call_site()} "
            "in an exit handler. Register the handler after initialize(): it runs first then."
        )
    raise DistmanError(
        f"{what} must be made in the process of the rank, pid {_home}, got one at {call_site()} in its child "
        f"{os.getpid()}. Move it out of the data loader's worker."
    )


def check_all_run_here(ranks: Iterable[int], operation: str = "") -> None:
    """Check that this thread may wait for these ranks: that all of them run where it runs."""
    check_speaks_for_rank("a call that waits for others")
    region = restriction()
    if region is None or region.ranks.issuperset(ranks):
        return
    wait = _waiting.get(threading.get_ident())
    operation = operation or (wait.operation if wait else "a call that waits for others")
    raise DistmanError(
        f"{operation} must be called where all its ranks run, got a call within {region.what} at {call_site()}. Move "
        "it out of there, or pass a group whose ranks all run there."
    )


def current_wait() -> TrackedWait | None:
    return _waiting.get(threading.get_ident())


def wait_of_program() -> TrackedWait | None:
    """Return what the program waits for: the main thread, else one that runs its backward pass, else any of its own."""
    main = threading.main_thread().ident
    found = [wait for wait in waits() if wait.is_of_program]
    return next((wait for wait in found if wait.thread == main), found[0] if found else None)


def is_threaded() -> bool:
    return _is_threaded


def _is_of_program(thread: int) -> bool:
    """Return whether a thread that waits is not one of this package's own, and remember that a program has several."""
    global _is_threaded
    if thread == threading.main_thread().ident:
        return True
    here = threading.current_thread()
    if here.name.startswith("distman"):
        return False
    _is_threaded |= not here.name.startswith("Dummy-")  # else one of torch's, in a backward pass
    return True


def waits() -> list[TrackedWait]:
    return list(_waiting.values())


class LongWait(Protocol):
    """What is waited in; as a text, what it is and where."""

    @property
    def since(self) -> float: ...


def describe_here(more: Iterable[LongWait] = ()) -> str:
    """Return what this process is doing with respect to other ranks, in words; it may wait in more than is tracked."""
    now = [f"in {wait} for {time.monotonic() - wait.since:.0f} s" for wait in (*waits(), *more)]
    return ", ".join(now) or _last


def call_site() -> str:
    return line_of(sys._getframe(1))


def line_of(frame: FrameType) -> str:
    """Return file and line of the innermost call on a stack that is neither this package's own nor torch's."""
    folders = internal_folders()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def frame_of_main_thread() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def line_of_main_thread() -> str:
    """Return where in the user's program the main thread is: ``train.py:31 in step, in all_reduce()``."""
    innermost = frame_of_main_thread()
    if innermost is None:
        return ""
    frame = innermost
    while frame.f_back is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return place if frame is innermost else f"{place}, in {innermost.f_code.co_name}()"


def stacks() -> str:
    """Return the stack of every thread of this process but the calling one, the main thread's first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        if is_idle(frames[ident]):
            continue
        lines = "".join(traceback.format_stack(frames[ident]))
        texts.append(f"thread {names.get(ident, ident)}\n{lines}")
    return "\n".join(texts)
