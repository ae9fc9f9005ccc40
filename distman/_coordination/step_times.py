"""Where the time of this rank's training steps goes, by its own clock: a step lasts from one batch to the next."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from distman._base.process_state import puts_back
from distman._torch_internals import queue_callback

T = TypeVar("T")

LOADING, FORWARD, BACKWARD, COMPUTING, WAITING, APART = range(6)
"""What a step is made of. What only some ranks do, such as saving, is apart: nobody else does it for comparison."""

COMPARED = ("loading", "forward", "backward", "computing")
"""The names of those in which ranks are compared; the last one is all else."""

_MOST_STEPS = 1024  # of which the times are kept until they are read


class StepTimes:
    """Adds up the phases of each step of the loop over one loader, in the thread of that loop."""

    def __init__(self) -> None:
        self._steps: deque[list[float]] = deque(maxlen=_MOST_STEPS)
        self._loop: object = None  # which a step belongs to; another loader in it is a part of the step
        self._thread = 0
        self._phase = COMPUTING
        self._is_told = False  # where steps end, by what takes them
        self._since = 0.0
        self._sums = [0.0] * 6

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what a loader yields, and count as loading what it takes for that."""
        loop = object()
        before = self._ask(loop)
        try:
            for batch in loader:
                self.enter(before)
                yield batch
                before = self._ask(loop)
        finally:
            if self._loop is loop:
                self._loop = None
            elif self._phase == LOADING:
                self.enter(before)

    def _ask(self, loop: object) -> int:
        """Begin to load, which ends the step of this loop, and return what goes on when the batch is there."""
        before = self.enter(LOADING)
        if self._loop is None:
            self._loop, self._thread = loop, threading.get_ident()
            self._phase, self._since, self._sums, self._is_told = LOADING, time.perf_counter(), [0.0] * 6, False
        elif self._loop is loop and not self._is_told:
            self._end()
        return COMPUTING if self._loop is loop else before

    def end_step(self) -> None:
        """End a step that may have had several batches: in this loop they do not end steps any more."""
        self.enter(COMPUTING)
        self._is_told = True
        self._end()

    def _end(self) -> None:
        if self._loop is not None:
            self._steps.append(self._sums)
            self._sums = [0.0] * 6

    def enter(self, phase: int) -> int:
        """Count the time of the loop's thread from now on for a phase, and return the one before."""
        return self.enter_from_anywhere(phase) if threading.get_ident() == self._thread else self._phase

    def enter_from_anywhere(self, phase: int) -> int:
        """Do the same in any thread, for one that waits for this one."""
        before = self._phase
        if self._loop is not None:
            now = time.perf_counter()
            self._sums[before] += now - self._since
            self._phase, self._since = phase, now
        return before

    def count_wait(self, thread: int, seconds: float) -> None:
        """Take from the present phase what a thread has just waited for others."""
        if self._loop is not None and thread == self._thread:
            self._sums[WAITING] += seconds
            self._since += seconds

    def read(self, min_steps: int, min_seconds: float) -> list[float] | None:
        """Return the seconds of each phase in the next steps, at least that many and that long; else None.

        They are the lower quartiles: what else the machine does makes some steps longer, and none shorter. Of loading
        it is the mean: with workers, most batches are there already.
        """
        lengths = itertools.accumulate(sum(step) for step in [*self._steps])
        enough = next((n for n, one in enumerate(lengths, start=1) if n >= min_steps and one >= min_seconds), None)
        if enough is None:
            return None
        is_behind = len(self._steps) >= 2 * enough  # where this is called seldom
        steps = [self._steps.popleft() for _ in range(len(self._steps) if is_behind else enough)]
        quartiles = [sorted(times)[len(steps) // 4] for times in zip(*steps, strict=True)]
        return [sum(step[LOADING] for step in steps) / len(steps), *quartiles[1:]]


_times = StepTimes()


def current() -> StepTimes:
    return _times


def time_reductions(wrapped: torch.nn.Module) -> None:
    """Count what a DistributedDataParallel waits for its reductions, between the end of a backward pass and theirs."""

    def wait() -> None:  # queued before DDP, in the same pass, queues its own wait
        before = _times.enter_from_anywhere(WAITING)

        def go_on() -> None:
            _times.enter_from_anywhere(before)

        queue_callback(go_on)

    parameter = next(one for one in wrapped.parameters() if one.requires_grad)
    hook = parameter.register_hook(lambda _: queue_callback(wait))  # type: ignore[no-untyped-call]  # torch leaves it
    weakref.finalize(wrapped, hook.remove)


@puts_back
def _forget() -> None:
    global _times
    _times = StepTimes()
