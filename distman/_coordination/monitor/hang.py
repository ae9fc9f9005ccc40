"""Waits that last too long: asking all ranks where they are, and writing it into one file."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distman._base import timing
from distman._base.log import logger
from distman._base.private_files import private_folder, write_new
from distman._base.text import printable, printable_lines, shortened
from distman._coordination import protocol, tracking
from distman._coordination.messages import count, decode_at_once, encode, is_first, read_numbers
from distman._coordination.monitor.context import WatchContext
from distman._coordination.timeouts import begin
from distman._coordination.tracking import LongWait
from distman._torch_internals import blocking_call, operations_begun

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore


_MAX_STACKS = 100_000  # characters: some hundred threads, in one message to the store
_COMPUTING = 0.05  # of the time at a place: a thread that waits for others takes next to no CPU time
_MAX_NAMED = 4  # ranks that are named in full in one line of the log

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Answer:
    waiting: str  # what it waits in, or waited in last, in words; empty if it never did
    stacks: str  # of its threads
    line: str  # where in the user's program its main thread is
    seconds: float = 0.0  # how long it has been waiting for others; 0 if it does not

    begun: dict[str, int] = dataclasses.field(default_factory=dict)  # torch's collectives, by the name of their group

    @classmethod
    def here(cls, more: Sequence[LongWait] = ()) -> Answer:  # it may wait in more than is tracked
        """Return where this process is; not for the main thread, whose stack is wanted."""
        stacks = shortened(tracking.stacks(), _MAX_STACKS)
        seconds = max((time.monotonic() - wait.since for wait in tracking.waits()), default=0.0)
        line = tracking.line_of_main_thread()
        return cls(tracking.describe_here(more), stacks, line, seconds, operations_begun())

    @property
    def place(self) -> str:
        """What the rank waits in and since when; of one that waits for nobody, the last line of its main thread."""
        if self.waiting.startswith("in "):
            return printable(self.waiting)
        return printable(", ".join(filter(None, (f"at {self.line}" if self.line else "", self.waiting))))


def ask_where(store: TorchStore, ranks: Sequence[int], timeout: float) -> dict[int, Answer]:
    """Return where these ranks are, as far as they answer."""
    number = count(store, protocol.QUERY_NUMBERS, 1)
    count(store, protocol.answered(number))  # which is there for as long as somebody waits for answers
    for rank in ranks:
        store.append(protocol.queries(rank), f"{number},")
    count(store, protocol.NEWS, 1)
    until = time.monotonic() + timeout
    while count(store, protocol.answered(number)) < len(ranks) and time.monotonic() < until:
        time.sleep(timing.WATCH_ANSWER_PAUSE)
    keys = {rank: protocol.answer(number, rank) for rank in ranks}
    found = {rank: decode_at_once(store, keys[rank], Answer, f"rank {rank}'s answer to a query") for rank in ranks}
    store.delete_keys([protocol.answered(number), *keys.values()])
    return {one: answer for one, answer in found.items() if answer is not None}


@dataclasses.dataclass
class StackQueries:
    store: TorchStore
    rank: int
    num_seen: int = 0  # queries that this rank has looked at

    def answer(self, more: Sequence[LongWait] = ()) -> None:
        """Answer the queries that are new, see :meth:`Answer.here`."""
        numbers = read_numbers(self.store, protocol.queries(self.rank))
        for number in numbers[self.num_seen :]:
            here = encode(Answer.here(more))
            if self.store.check([protocol.answered(number)]):  # else nobody would delete what comes too late
                self.store.set(protocol.answer(number, self.rank), here)
                count(self.store, protocol.answered(number), 1)
        self.num_seen = len(numbers)


@dataclasses.dataclass(eq=False)
class Standstill:
    """The main thread waits in something at one place."""

    place: str  # in the user's program; empty between the program and the end of the interpreter
    since: float  # when it was seen there first
    what: str = "work of its GPU"

    def __str__(self) -> str:
        return f"{self.what} at {self.place}" if self.place else self.what


class CallWatch:
    """Finds out that the main thread waits in a call of torch, other than those that tell in what they wait.

    It stands at one place, look after look, for half of the limit, and does not compute there. What it calls is not
    asked before: for an answer, Python may keep the variables of the program alive.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit  # seconds that a wait may last
        self._wait: Standstill | None = None  # since the last look
        self._cpu_seconds = 0.0

    def look(self) -> Standstill | None:
        """Return what the main thread, not this one, seems to wait in; only its length proves that it does."""
        place, now = tracking.line_of_main_thread(), time.monotonic()
        cpu_seconds = time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
        wait, seconds = self._wait, now - self._wait.since if self._wait is not None else 0.0
        if wait is None or place != wait.place or cpu_seconds - self._cpu_seconds > _COMPUTING * seconds:
            wait, self._cpu_seconds = Standstill(place, now, ""), cpu_seconds
        elif seconds > self._limit / 2 and not wait.what:
            wait.what = blocking_call(tracking.frame_of_main_thread())
        self._wait = wait
        return wait if wait.what else None


class DeviceWatch:
    """Finds out that the main thread waits for a GPU which comes to no end.

    A program that is slow is found at one place look after look, too. So once it was at one for half of the limit,
    another thread waits for all that the GPU was given by then: a GPU that works comes to the end of that. Nothing is
    asked of the GPU sooner, since another thread must not do so while CUDA records a graph.
    """

    def __init__(self, limit: float, wait_for_device: Callable[[], None]) -> None:
        self._limit = limit  # seconds that a wait may last
        self._wait_for_device = wait_for_device
        self._has_device_come: Callable[[float | None], bool] | None = None
        self._wait: Standstill | None = None  # since the last look

    def look(self) -> Standstill | None:
        """Return what the main thread, not this one, seems to wait for; only its length proves that it does."""
        place, now = tracking.line_of_main_thread(), time.monotonic()
        wait = self._wait
        if wait is None or place != wait.place or self._is_device_done():
            self._wait = Standstill(place, now)
        elif now - wait.since > self._limit / 2:
            self._has_device_come = self._has_device_come or begin(self._wait_for_device)
            return wait
        return None

    def _is_device_done(self) -> bool:
        try:
            is_done = self._has_device_come is not None and self._has_device_come(0)
        except RuntimeError:  # a kernel has failed, which the program hears of itself
            is_done = True
        if is_done:
            self._has_device_come = None
        return is_done


class HangWatch:
    """Asks all ranks for their stacks when this one waits too long, and is the job's reporter while its wait lasts."""

    def __init__(self, context: WatchContext, limit: float, patience: float) -> None:
        self._context = context
        self._limit = limit  # seconds that a wait may last
        self._patience = patience  # seconds for the answers
        self._reported: LongWait | None = None
        self._calls = CallWatch(limit)
        self.in_torch: Sequence[LongWait] = ()  # what the main thread waits in that is not tracked
        wait_for_device = context.wait_for_device
        self._device = DeviceWatch(limit, wait_for_device) if wait_for_device is not None else None

    def look(self, store: TorchStore, more: Sequence[LongWait] = ()) -> None:
        """Report a wait that lasts too long, unless one of this job is. Not for the main thread: it wants its stack."""
        still = self._calls.look()
        self.in_torch = [*more] or ([] if still is None else [still])
        waits: list[LongWait] = [*tracking.waits(), *self.in_torch]
        if self._device is not None and (wait := self._device.look()) is not None:
            waits.append(wait)
        if self._reported not in waits:
            self.let_others_report(store)
        late = [wait for wait in waits if time.monotonic() - wait.since > self._limit]
        if not late or self._reported is not None:
            return
        if is_first(store, protocol.HANG_REPORTER, self._context.rank):
            self._reported = late[0]
            self._report(late[0], store)

    def let_others_report(self, store: TorchStore) -> None:
        """Let another rank report a hang, if this one did: its wait is over, or it does not look any more."""
        if self._reported is not None:
            self._reported = None
            store.delete_key(protocol.HANG_REPORTER)

    def _report(self, wait: LongWait, store: TorchStore) -> None:
        rank, peers = self._context.rank, self._context.peers
        reason = f"{self._context.me} waits in {wait} for {time.monotonic() - wait.since:.0f} s"
        answers = ask_where(store, [peer.rank for peer in peers if peer.rank != rank], self._patience)
        answers[rank] = Answer.here(self.in_torch)
        write_report(reason, rank, answers, [str(peer) for peer in peers], Path.cwd())


def write_report(reason: str, asker: int, answers: Mapping[int, Answer], names: Sequence[str], folder: Path) -> None:
    """Write down where the ranks are, the rarest stacks first, and log a line that says where to read it."""
    silent = [rank for rank in range(len(names)) if rank not in answers]
    alike = _grouped(answers, lambda answer: (_without_seconds(answer.place), answer.stacks))
    parts = [
        reason,
        *(
            f"{names[rank]} does not answer: it is stopped or dead, or native code is holding the GIL"
            for rank in silent
        ),
    ]
    parts += _behind(answers, names)
    parts += [
        f"{_named(ranks, names)}\n{place}{_seconds([answers[rank] for rank in ranks])}\n\n{printable_lines(stacks)}"
        for (place, stacks), ranks in alike
    ]
    path = _write("\n\n".join(parts) + "\n", folder)
    place_of_asker = _without_seconds(answers[asker].place)
    by_place = _grouped(answers, lambda answer: _without_seconds(answer.place))
    elsewhere = [f"{_named(ranks, names)} {place}" for place, ranks in by_place if place != place_of_asker]
    elsewhere += [f"{_named(silent, names)} without an answer"] if silent else []
    logger.warning("%s; %s. The stacks of all ranks are in %s", reason, "; ".join(elsewhere) or "all do", path)


def _behind(answers: Mapping[int, Answer], names: Sequence[str]) -> list[str]:
    """Return for each group of torch's in which ranks have begun more collectives than others which ones these are."""
    found = []
    for group in sorted({group for answer in answers.values() for group in answer.begun}):
        numbers = {rank: answer.begun[group] for rank, answer in answers.items() if group in answer.begun}
        by_number = _grouped(numbers, int)
        if len(by_number) > 1:
            parts = [f"{_named(ranks, names)} {number}" for number, ranks in sorted(by_number)]
            found.append(f"of torch's collectives in group {group} have begun: {', '.join(parts)}")
    return found


def _grouped(answers: Mapping[int, Value], key: Callable[[Value], Key]) -> list[tuple[Key, list[int]]]:
    groups: dict[Key, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        groups.setdefault(key(answer), []).append(rank)
    return sorted(groups.items(), key=lambda group: len(group[1]))


def _write(text: str, folder: Path) -> Path:
    name = f"distman-hang-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.txt"
    for is_elsewhere in (False, True):
        try:
            path = (private_folder() if is_elsewhere else folder) / name
            write_new(path, text)  # for nobody else: stacks tell what the program does
        except OSError:
            continue
        return path
    return Path("no file: neither folder can be written")


def _named(ranks: Sequence[int], names: Sequence[str]) -> str:
    if len(ranks) <= _MAX_NAMED:
        return ", ".join(names[rank] for rank in ranks)
    return f"{names[ranks[0]]} and {len(ranks) - 1} more ({', '.join(map(str, ranks[1:]))})"


def _seconds(answers: Sequence[Answer]) -> str:
    """Return for how long ranks at one place have waited there, such as `` for 3 to 5 s``; nothing if they do not."""
    found = {answer.place.removeprefix(_without_seconds(answer.place)) for answer in answers}
    numbers = sorted(int(one[len(" for ") : -len(" s")]) for one in found if one)
    return f" for {' to '.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} s" if numbers else ""


def _without_seconds(place: str) -> str:
    return place.rpartition(" for ")[0] if place.endswith(" s") else place
