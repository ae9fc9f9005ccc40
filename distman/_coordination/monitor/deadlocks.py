"""Two ranks that wait for each other in different calls, which neither can leave: found at no cost before they wait.

A rank that has waited for a second writes down what it waits in, and looks whether a rank that it waits for has written
down something else, for which it waits for this one. That rank then checks the same from its side. So both have waited
for each other at one moment, and since neither does anything else, for ever. What lasts long proves nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._base import timing
from distman._base.text import Line, printable
from distman._coordination import protocol, tracking
from distman._coordination.failure.delivery import error_in_hand
from distman._coordination.failure.record import EXITED, FailureRecord, Place
from distman._coordination.messages import count, decode, decode_at_once, encode, read_at_once
from distman._coordination.monitor.refusals import progress
from distman._coordination.tracking import Call, StoreWait, TrackedWait
from distman._torch_internals import TorchWait, operations_begun, torch_wait_in
from distman.errors import JobFailed, PlanMismatchError

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_ASKED_IN_ALL = 64  # ranks at one look of all ranks: each costs a call into the store, and all may wait
_NO_CAUSE = (GeneratorExit, KeyboardInterrupt, StopAsyncIteration, StopIteration, asyncio.CancelledError, JobFailed)
"""Errors that are in hand in programs in which nothing has failed, or something elsewhere."""


@dataclasses.dataclass(frozen=True)
class _Told:
    """What a rank waits in, as the others read it."""

    key: Line  # what it is: the same on all ranks that wait in the same
    text: Line  # what it is, in words
    line: Line  # rank, text, and line of the program, for messages
    place: Line  # the same, with the function that the program called in place of the text
    label: Line  # of the group of a collective, for messages
    group: str  # name of its process group, empty for what waits in the store
    number: int  # of the collective in that group
    is_of_torch: bool  # it is a call of torch's own
    is_message: bool  # from one rank to another
    is_threaded: bool  # other threads of the program may do what this one does not
    begun: dict[str, int]  # the last collective of this package that the rank has begun, by process group
    begun_in_torch: dict[str, int]  # the same of torch's
    error: FailureRecord | None  # of the error that it has in hand


class _Wait:
    """What the program of this rank waits in: its main thread, or another one."""

    def __init__(self, what: StoreWait | Call | TorchWait, tracked: TrackedWait | None, thread: int | None) -> None:
        self.what = what
        self.tracked = tracked
        self.thread = thread
        self.since = what.since if not isinstance(what, TorchWait) else time.monotonic()
        self.told: _Told | None = None

    def __str__(self) -> str:
        title = self.what.title if isinstance(self.what, TorchWait) else self.what.text
        return f"{title}, at {self._line}"

    @property
    def _line(self) -> str:
        if isinstance(self.what, TorchWait):
            return self.what.line
        return self.tracked.line if self.tracked is not None else ""

    def tell(self, me: Place) -> _Told:
        (group, number), text, line = self.what.place, self.what.text, self._line
        operation = self.tracked.operation if self.tracked is not None else text
        error, is_main = error_in_hand(self.thread), self.thread == threading.main_thread().ident
        failure = None if error is None or isinstance(error, _NO_CAUSE) else FailureRecord.of(error, me.rank)
        if failure is not None and failure.error_type == EXITED and not is_main:  # it ends the thread, not the program
            text = f"ended a thread by sys.exit() or SystemExit: {error}"
            failure = dataclasses.replace(failure, error_type=SystemExit.__name__, error_text=text)
        self.told = _Told(
            key=_key(group, number, text),
            text=text,
            line=f"{me}: {text}, at {line}",
            place=f"{me}: in {operation}, at {line}",
            label=self.what.label,
            group=group,
            number=number,
            is_of_torch=isinstance(self.what, TorchWait),
            is_message=isinstance(self.what, TorchWait) and self.what.is_message,
            is_threaded=tracking.is_threaded() or not is_main,
            begun=progress(),
            begun_in_torch=operations_begun(),
            error=failure,
        )
        return self.told

    def is_for(self, rank: int, told: _Told) -> bool:
        """Return whether it waits for a rank that waits in what it has told."""
        mine = self.told
        if mine is None or mine.key == told.key:
            return False
        # A rank that holds an error while it waits has failed, whatever other threads do.
        has_failed = mine.error is not None or told.error is not None
        is_alone = has_failed or not (mine.is_threaded or told.is_threaded)
        if mine.is_message or told.is_message:
            # Without an error it may have been sent by one that has gone on. It counts as a collective begun, too.
            return has_failed and rank in self.what.ranks
        if isinstance(self.what, StoreWait) or not mine.group:
            return is_alone and rank in self.what.ranks
        begun = (told.begun_in_torch if mine.is_of_torch else told.begun).get(mine.group, -1)
        has_begun = begun >= mine.number
        if isinstance(self.what, TorchWait) and not has_failed:
            # The program's messages are in these numbers: ranks of which one has sent more than the other are apart.
            has_begun = not self.what.is_for_all or begun != mine.number - 1
        is_in_it = (told.group, told.number, told.is_of_torch) == (mine.group, mine.number, mine.is_of_torch)
        return rank in self.what.ranks and (is_in_it or (is_alone and not has_begun))


class DeadlockWatch:
    """Finds out whether this rank and another one wait for each other in different calls, and ends both waits."""

    def __init__(self, rank: int, peers: Sequence[Place]) -> None:
        self._me = peers[rank]
        self._peers = peers
        self._most_asked = max(1, _ASKED_IN_ALL // len(peers))
        self._wait: _Wait | None = None
        self._unasked: list[int] = []

    @property
    def in_torch(self) -> list[_Wait]:
        """The collective of torch's own that the program is in, if it is in one."""
        return [self._wait] if self._wait is not None and isinstance(self._wait.what, TorchWait) else []

    def look(self, store: TorchStore, *, is_news: bool) -> None:
        """Tell the others of a wait that lasts, and end it if it cannot end otherwise."""
        now, wait = _find(), self._wait
        if now is None or wait is None or now.what != wait.what:
            if wait is not None and wait.told is not None:
                store.delete_key(protocol.waiting(self._me.rank))
            self._wait = now
            return
        if time.monotonic() - wait.since < timing.MUTUAL_WAIT:
            return
        is_new = wait.told is None
        told = wait.told or wait.tell(self._me)
        if is_new:
            store.set(protocol.waiting(self._me.rank), encode(told))
            others = [rank for rank in wait.what.ranks if rank != self._me.rank]
            self._unasked = random.sample(others, len(others))
        if is_new or is_news:
            self._end_if_told(store, wait, told)
            self._confirm(store, wait, told)
        self._ask(store, wait, told)

    def _ask(self, store: TorchStore, wait: _Wait, mine: _Told) -> None:
        """Look whether ranks that this one may wait for wait in something else; that one is to check it, too."""
        for rank in self._unasked[: self._most_asked]:
            other = _told(store, rank)
            if other is not None and wait.is_for(rank, other):
                store.append(protocol.suspected(rank), f"{json.dumps([self._me.rank, mine.key, other.key])}\n")
                count(store, protocol.NEWS, 1)
        del self._unasked[: self._most_asked]

    def _confirm(self, store: TorchStore, wait: _Wait, mine: _Told) -> None:
        """End the waits of this rank and of another one that suspects it, if this one waits for that one, too."""
        for line in (read_at_once(store, protocol.suspected(self._me.rank)) or "").splitlines():
            rank, its_key, my_key = decode(line, tuple[int, str, str], "a suspicion")
            if my_key != mine.key:
                continue  # it was of an earlier wait
            other = _told(store, rank)
            if other is not None and other.key == its_key and wait.is_for(rank, other):
                self._publish(store, rank, other, mine)
                self._end_if_told(store, wait, mine)

    def _publish(self, store: TorchStore, rank: int, other: _Told, mine: _Told) -> None:
        text = _describe(mine, other)
        failure = mine.error or other.error
        if failure is None and (mine.is_of_torch or other.is_of_torch):
            place = self._me if mine.is_of_torch else self._peers[rank]
            reason = f"waits for ever: {text}".replace("\n ", "")
            failure = FailureRecord.about(place, PlanMismatchError.__name__, reason)
        if failure is not None:
            failure.publish(store)
        else:
            for told in (mine, other):
                store.set(protocol.deadlock(told.key), json.dumps(text.splitlines()))
        count(store, protocol.NEWS, 1)

    def _end_if_told(self, store: TorchStore, wait: _Wait, mine: _Told) -> None:
        text = _reason(store, mine.key)
        if text and wait.tracked is not None:
            wait.tracked.mismatch = text
            if isinstance(wait.what, Call):
                wait.what.interrupt()


def reason_of(store: TorchStore, call: Call) -> str:
    group, number = call.place
    return _reason(store, _key(group, number, call.text)) if group else ""


def _reason(store: TorchStore, key: str) -> str:
    return "\n".join(decode_at_once(store, protocol.deadlock(key), list[Line], f"why {key} does not end") or ())


def _key(group: str, number: int, text: str) -> str:
    return printable(f"{group} {number} {text}" if group else text)


def _told(store: TorchStore, rank: int) -> _Told | None:
    return decode_at_once(store, protocol.waiting(rank), _Told, f"what rank {rank} waits in")


def _describe(mine: _Told, other: _Told) -> str:
    places = "\n".join(f"  {place}" for place in sorted((mine.place, other.place)))
    lines = "\n".join(f"  {line}" for line in sorted((mine.line, other.line)))
    if mine.group and (mine.group, mine.number) == (other.group, other.number):
        where = f"exchange {mine.number} of group {mine.label}"
        return (
            f"all ranks must make the same call at {where}, but two differ. Correct them; the group's connections are "
            f"closed.\n{lines}"
        )
    return (
        "all ranks must make the same calls in the same order, but two wait for each other in different ones. Correct "
        f"them.\n{places}"
    )


def _find() -> _Wait | None:
    tracked = tracking.wait_of_program()
    if tracked is not None and (what := tracked.store_wait or tracked.call) is not None:
        return _Wait(what, tracked, tracked.thread)
    main, frames = threading.main_thread().ident, sys._current_frames()
    del frames[threading.get_ident()]  # this very frame, which would keep all of them, and the program's files open
    if tracked is not None:  # a call of this package, in a collective of torch's own
        in_torch = torch_wait_in(frames.get(tracked.thread), tracking.line_of)
        return _Wait(in_torch, tracked, tracked.thread) if in_torch is not None else None
    for thread in sorted(frames, key=lambda one: one != main):
        in_torch = torch_wait_in(frames[thread], tracking.line_of)
        if in_torch is not None:
            return _Wait(in_torch, None, thread)
    return None
