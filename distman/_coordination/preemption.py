"""Preemption: all ranks stop at the same step, though only one of them was asked to, and Slurm runs the job again."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.messages import claim, count, decode, decode_text
from distman._coordination.stop_signals import DEFAULT_SIGNALS, StopSignals
from distman._coordination.sync import StoreGroup
from distman._coordination.time_limit import TimeLimit, saves
from distman._coordination.wait_scope import WaitScope
from distman.errors import DistmanError, PlanMismatchError

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore

_GAP_RESERVE = 1.25  # of the longest time between two calls: the next one may be longer
_ASKED, _LEAVES = "asked", "leaves"  # what wakes the thread that looks for a stop


class StopAgreement:
    """Lets all ranks stop at the same step, though nothing is exchanged in a step.

    A thread of each rank looks into the store twice a second, whether any rank was asked to stop. Then it writes down
    the step that its rank has passed last, and the rank goes no further before all have done so. All stop at the first
    step after the furthest of these, which no rank can have passed. The threads write while their ranks compute, or
    wait in a collective, so no rank is waited for that waits for this one.
    """

    def __init__(
        self,
        store_group: StoreGroup | None,
        signals: Sequence[int] = DEFAULT_SIGNALS,
        time_limit: TimeLimit | None = None,
        margin: float | None = None,
    ) -> None:
        self._store_group = store_group
        self._time_limit = time_limit or TimeLimit({})
        self._margin = margin
        self._longest = 0.0  # seconds between two calls without the saves: a step, with the validation after it
        self._last_call: tuple[float, float] | None = None  # when, and how long this process had saved by then
        self._signals = StopSignals(signals, self.request)
        self._wish = ""
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()  # a signal handler may put one in
        self._thread: threading.Thread | None = None
        self._answering = threading.Lock()
        self._has_answered = False
        self._last_step: int | None = None
        self._passed: int | None = None
        self._stops = False

    def request(self, reason: str = "request_stop()") -> None:
        self._wish = self._wish or reason
        self._events.put(_ASKED)

    def listen(self) -> None:
        """Let signals ask for a stop; a handler that was there before is called too."""
        self._signals.listen()

    def leave(self) -> None:
        """Let the others go on without this rank's answer: it comes to no further step."""
        if self._thread is not None:
            self._events.put(_LEAVES)
            self._thread.join(timing.FAREWELL)

    def restore(self) -> None:
        """Put the signal handlers back that were there before, which only the main thread can, and look no more."""
        self._store_group = None  # a handler that stays would keep the store open
        self._events.put(_LEAVES)
        self._signals.restore()

    def decide(self, step: int | None = None) -> bool:
        """Return whether to stop at this step, the same on all ranks; after a request, wait until all have heard."""
        last = self._last_step
        if step is None:
            step = 0 if last is None else last + 1
        try:
            step = operator.index(step)  # of NumPy's numbers and tensors, too, which json does not know
        except TypeError:
            raise TypeError(f"step must be a whole number, got {step!r}. Pass the number of the step.") from None
        if last is not None and step < last:
            raise ValueError(
                f"step must not be smaller than the one before, {last}, got {step}. Count the steps of all epochs "
                "together."
            )
        self._last_step = step
        self._longest = self._longest_gap()
        self._last_call = time.monotonic(), saves().total
        group = self._store_group
        if group is None:
            self._time_limit.ask()
            self._heed_time_limit()
            return bool(self._wish)
        if self._thread is None:
            _check_same(group, protocol.STOP_FIRST_STEP, step)
            arguments = (group.job_store.clone(), group.rank, group.size)
            self._thread = threading.Thread(target=self._look, args=arguments, name="distman-stop", daemon=True)
            self._thread.start()
        with self._answering:
            if not self._has_answered:
                self._passed = step
                return False
        return self._stops or self._stops_at(group, step)

    def time_left(self) -> float | None:
        group = self._store_group
        if group is None or group.rank == 0:
            self._time_limit.ask()
        elif self._time_limit.end is None and group.job_store.check([protocol.STOP_END]):
            self._time_limit.believe(decode(group.job_store.get(protocol.STOP_END), float, "the end of the job"))
        return self._time_limit.left()

    def _ask_scheduler(self, store: TorchStore) -> None:
        end = self._time_limit.ask()
        if end is not None:
            with contextlib.suppress(dist.DistError):
                store.set(protocol.STOP_END, json.dumps(end))

    def _heed_time_limit(self) -> None:
        """Ask for a stop when the time that is left is just enough for another step and a save."""
        left = self._time_limit.left()
        margin = self._measured_margin() if self._margin is None else self._margin
        if left is not None and left < margin:
            self._wish = self._wish or f"the job's time is up in {left:.0f} s"

    def _longest_gap(self) -> float:
        """Return the longest time between two calls, or since the last one, without the saves in it."""
        if self._last_call is None:
            return 0.0
        when, saved = self._last_call
        return max(self._longest, time.monotonic() - when - (saves().total - saved))

    def _measured_margin(self) -> float:
        """Return the seconds that the way to the next call takes, and a save there, after one that may be on the way.

        Where this package has not saved, a save may be in the longest gap, and another one is to come.
        """
        gap = self._longest_gap()
        return max(timing.STOP_MARGIN, _GAP_RESERVE * gap + 2 * saves().longest if saves().longest else 2 * gap)

    def _look(self, store: TorchStore, rank: int, size: int) -> None:
        """Look for a stop until there is one, or this rank leaves; then say which step it has passed."""
        event, wait = "", max(timing.STOP_EVERY, timing.STOP_EVERY_PER_RANK * size)
        with contextlib.suppress(dist.DistError):  # the store is gone: the job has failed, or this rank has left it
            if rank == 0 and self._time_limit.can_ask:  # a busy scheduler is waited for elsewhere
                threading.Thread(target=self._ask_scheduler, args=(store.clone(),), daemon=True).start()
            while event != _LEAVES and not store.check([protocol.STOP]):
                if rank == 0:
                    self._heed_time_limit()
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=wait)
                if self._wish:
                    store.set(protocol.STOP, self._wish)
            with self._answering:
                self._has_answered = True
            store.set(protocol.stop_passed(rank), json.dumps(self._passed))
            if count(store, protocol.STOP_ANSWERS, 1) == size:  # the last rank says which step all have passed
                passed = [_decode_step(store.get(protocol.stop_passed(one)), f"rank {one}") for one in range(size)]
                furthest = max((step for step in passed if step is not None), default=None)
                store.set(protocol.STOP_AFTER, json.dumps(furthest))

    def _stops_at(self, group: StoreGroup, step: int) -> bool:
        """Return whether to stop, now that a rank was asked to; wait until all have answered."""
        store = group.job_store
        with WaitScope("should_stop()"):
            group.wait_until(
                lambda: store.check([protocol.STOP_AFTER]),
                place="should_stop()",
                awaited=lambda: (one for one in range(group.size) if not store.check([protocol.stop_passed(one)])),
                key=protocol.STOP_AFTER,
            )
        furthest = _decode_step(store.get(protocol.STOP_AFTER), "all ranks")
        if furthest is not None and step <= furthest:
            return False
        _check_same(group, protocol.STOP_STEP, step)
        self._stops = True
        hook.expect_exits(os.EX_TEMPFAIL)  # with which a program asks to be started again
        logger.info("all ranks stop at step %d: %s", step, printable(decode_text(store.get(protocol.STOP))))
        return True


def _decode_step(data: bytes, whose: str) -> int | None:
    wanted: Any = int | None  # mypy holds no type for it
    step: int | None = decode(data, wanted, f"the step that {whose} passed")
    return step


def _check_same(group: StoreGroup, key: str, step: int) -> None:
    other = claim(group.job_store, key, str(step), lambda found: decode(found, int, f"the step of others, {key}"))
    if other != step:
        raise PlanMismatchError(
            f"step must be the same on all ranks, got {step} on {group.describe(group.rank)} and {other} on another. "
            "Call should_stop(step) once per step on every rank."
        )


def requeue(environ: Mapping[str, str]) -> None:
    """Put this Slurm job back into the queue, unless Slurm ends it: a cancelled one is not wanted back.

    One that is preempted is not ended by then, but queued again.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        raise DistmanError("only a Slurm job can be requeued: SLURM_JOB_ID is not set. Submit it with sbatch.")
    name = environ.get("SLURM_ARRAY_JOB_ID", job)
    if "SLURM_ARRAY_TASK_ID" in environ:
        name += f"_{environ['SLURM_ARRAY_TASK_ID']}"
    if re.search(r"\bJobState=COMPLETING\b", _run(["scontrol", "show", "job", "--oneliner", name]).stdout):
        logger.info("job %s is not queued again: Slurm already ends it, as scancel asks", name)
        return
    command = ["scontrol", "requeue", name]
    done = _run(command)
    if done.returncode not in (0, -signal.SIGTERM):  # Slurm ends the job, and its own command within
        reason = (done.stderr or done.stdout).strip()
        raise DistmanError(f"{' '.join(command)} failed: {reason}. Submit with sbatch --requeue.")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timing.SCHEDULER)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistmanError(f"{' '.join(command)} failed on rank 0's host: {error}. Install Slurm's clients.") from error
