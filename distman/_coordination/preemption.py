"""Preemption: all ranks stop at the same step, though only one of them was asked to, and Slurm runs the job again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from distman._coordination import protocol
from distman._coordination.messages import claim, decode, decode_text
from distman._coordination.sync import KeySequence, StoreGroup
from distman._log import logger
from distman._text import printable
from distman.errors import DistmanError, PlanMismatchError

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SHORTEST_INTERVAL = 1.0  # seconds between decisions: a preempted job has half a minute or more to save
_INTERVAL_PER_RANK = 1e-3  # seconds; at most 1,000 decisions a second in all reach the store
_MOST_STEPS = 100  # steps between decisions, should they become slower all of a sudden
_SLURM_PATIENCE = 30.0  # seconds; a busy controller takes some, and retries by itself

Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclasses.dataclass(frozen=True)
class _Decision:
    """What all ranks do at a step."""

    step: int
    stops: bool
    next_step: int


class StopAgreement:
    """Decides, at steps that all ranks know beforehand, whether to go on.

    Every rank that comes to such a step looks at what the first one there wrote: stop or go on, and which step is the
    next to decide at. So nobody waits for anybody, and between these steps nothing is asked. They are about a second
    apart at the pace of the steps before, further for many ranks, and at most a hundred steps.

    Args:
        store_group: All ranks of the job; None on one process.
    """

    def __init__(self, store_group: StoreGroup | None) -> None:
        self._store_group = store_group
        self._keys: KeySequence | None = None
        if store_group is not None:
            self._keys = KeySequence(store_group.job_store, protocol.STOP_DECISIONS, store_group.size)
        self._wish = ""
        self._previous: dict[int, Handler] = {}
        self._is_over = False
        self._pid = os.getpid()
        self._last_step: int | None = None
        self._next_step: int | None = None
        self._decided_at = (0, time.monotonic())
        self._stops = False

    def request(self, reason: str = "request_stop()") -> None:
        """Ask for a stop.

        Args:
            reason: Who asks, for messages.
        """
        self._wish = self._wish or reason

    def listen(self) -> None:
        """Let SIGTERM and SIGUSR1 ask for a stop; a handler that was there before is called too.

        Only the main thread can; in others nothing happens.
        """
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._previous = {number: _handler_in_use(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Put the signal handlers back that were there before.

        Only the main thread can; in others, or where a later handler calls the one that is here, this one stays and
        hands each signal over.
        """
        self._is_over = True
        self._store_group = self._keys = None  # a handler that stays would keep the store open
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)

    def decide(self, step: int | None = None) -> bool:
        """Return whether to stop at this step, the same on all ranks.

        Local: it waits for nobody.

        Args:
            step: Number of the step, growing, and the same on all ranks; None is the one after the last.

        Raises:
            ValueError: The step is smaller than the one before.
            PlanMismatchError: The ranks ask at different steps.
        """
        if step is None:
            step = 0 if self._last_step is None else self._last_step + 1
        if self._last_step is not None and step < self._last_step:
            raise ValueError(
                f"step must not be smaller than the one before, {self._last_step}, got {step}. Count the steps of all "
                "epochs together."
            )
        self._last_step = step
        if self._store_group is None or self._keys is None:
            return bool(self._wish)
        if self._stops or (self._next_step is not None and step < self._next_step):
            return self._stops
        store = self._store_group.job_store
        if self._wish:
            store.set(protocol.STOP, self._wish)
        next_step = step + self._num_steps(step, self._store_group.size)
        proposal = _Decision(step, bool(store.check([protocol.STOP])), next_step)
        key = self._keys.next()
        decision = claim(
            store,
            key,
            json.dumps(dataclasses.asdict(proposal)),
            lambda found: decode(found, _Decision, f"the decision whether to stop, {key}"),
        )
        if decision.step != step:
            raise PlanMismatchError(
                f"step must be the same on all ranks, got {step} on "
                f"{self._store_group.describe(self._store_group.rank)} and {decision.step} on another. "
                "Call should_stop(step) once per step on every rank."
            )
        self._stops, self._next_step = decision.stops, decision.next_step
        if self._stops:
            reason = printable(decode_text(store.get(protocol.STOP)))
            logger.info("all ranks stop at step %d: %s", step, reason)
        return self._stops

    def _num_steps(self, step: int, world_size: int) -> int:
        """Return how many steps shall lie before the next decision, at the pace since the last one."""
        last_step, last_time = self._decided_at
        now = time.monotonic()
        self._decided_at = (step, now)
        if self._next_step is None:
            return 1
        num_steps = step - last_step
        wanted = max(_SHORTEST_INTERVAL, _INTERVAL_PER_RANK * world_size)
        at_this_pace = num_steps * wanted / max(now - last_time, 1e-9)
        return max(1, int(min(at_this_pace, 2 * num_steps, _MOST_STEPS)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        is_child = os.getpid() != self._pid  # to which the signal means what it always meant
        if not (self._is_over or is_child):
            self.request(f"{signal.Signals(number).name} of process {os.getpid()}")
        elif not (callable(previous) or previous == signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(previous):
            previous(number, frame)


def _handler_in_use(number: int) -> Handler:
    """Return what handles a signal, or did before agreements that are over."""
    handler = signal.getsignal(number)
    while isinstance(agreement := getattr(handler, "__self__", None), StopAgreement) and agreement._is_over:
        handler = agreement._previous[number]
    return handler


def requeue(environ: Mapping[str, str]) -> None:
    """Put the Slurm job of these variables back into the queue; Slurm ends what still runs of it.

    A job that Slurm already ends, because it was cancelled say, is left alone.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        DistmanError: There is no Slurm job, or Slurm refuses.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        raise DistmanError("only a Slurm job can be requeued: SLURM_JOB_ID is not set. Submit it with sbatch.")
    name = environ.get("SLURM_ARRAY_JOB_ID", job)
    if "SLURM_ARRAY_TASK_ID" in environ:
        name += f"_{environ['SLURM_ARRAY_TASK_ID']}"
    if _is_ending(name):
        logger.info("job %s is not queued again: Slurm already ends it, as scancel asks", name)
        return
    command = ["scontrol", "requeue", name]
    done = _run(command)
    if done.returncode not in (0, -signal.SIGTERM):  # Slurm ends the job, and its own command within
        reason = (done.stderr or done.stdout).strip()
        raise DistmanError(f"{' '.join(command)} failed: {reason}. Submit with sbatch --requeue.")


def _is_ending(name: str) -> bool:
    """Return whether Slurm ends the job: who cancels it does not want it back, who preempts it queues it himself."""
    return bool(re.search(r"\bJobState=COMPLETING\b", _run(["scontrol", "show", "job", "--oneliner", name]).stdout))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SLURM_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistmanError(f"{' '.join(command)} failed on rank 0's host: {error}. Install Slurm's clients.") from error
