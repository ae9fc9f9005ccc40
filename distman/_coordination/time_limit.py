"""How long the job may still run, as its scheduler says, and how much of that it needs to save."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from distman._base import timing
from distman._base.process_state import puts_back

END_TIME = "DISTMAN_END_TIME"
MARGIN = "DISTMAN_STOP_MARGIN"

_TOLD_BY = (END_TIME, "SLURM_JOB_END_TIME")
"""Variables with the end in seconds since the epoch.

Source:
    sbatch(1), output environment variables.
"""

_SLURM_TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")


def _of_slurm(answer: str) -> float | None:
    """Return the seconds of ``[[D-]HH:]MM:SS``; None where the job has no limit."""
    match = _SLURM_TIME.fullmatch(answer.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _of_pbs(answer: str) -> float | None:
    (job,) = json.loads(answer)["Jobs"].values()
    limit, used = _of_slurm(job["Resource_List"]["walltime"]), _of_slurm(job["resources_used"]["walltime"])
    return None if limit is None or used is None else limit - used


def _of_lsf(answer: str) -> float | None:
    """Return the seconds of ``H:M L``."""
    hours, _, minutes = answer.split()[0].partition(":")
    return int(hours) * 3600.0 + int(minutes) * 60


_QUESTIONS: tuple[tuple[str, tuple[str, ...], Callable[[str], float | None]], ...] = (
    ("SLURM_JOB_ID", ("squeue", "--noheader", "--format=%L", "--jobs"), _of_slurm),
    ("PBS_JOBID", ("qstat", "-f", "-F", "json"), _of_pbs),
    ("LSB_JOBID", ("bjobs", "-noheader", "-o", "time_left"), _of_lsf),
    ("FLUX_JOB_ID", ("flux", "job", "timeleft"), float),
)
"""The variable with a job's id, the command that is asked of that job, and what reads the seconds in its answer.

Source:
    squeue(1), qstat(1B) of OpenPBS, bjobs(1), flux-job(1).
"""


class TimeLimit:
    """The end of this process's job: told by a variable, or asked of the scheduler once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.end = _told(environ)  # in seconds since the epoch
        self._job_ids = [environ.get(variable, "") for variable, _, _ in _QUESTIONS]
        self._asking = threading.Lock()
        self.can_ask = self.end is None and any(self._job_ids)

    def left(self) -> float | None:
        return None if self.end is None else self.end - time.time()

    def ask(self) -> float | None:
        with self._asking:
            if self.can_ask:
                left = self._ask()
                self.end = None if left is None else time.time() + left
                self.can_ask = False
        return self.end

    def _ask(self) -> float | None:
        """Return the seconds that the scheduler answers; None where it gives no answer that can be read."""
        job, (_, command, read) = next(pair for pair in zip(self._job_ids, _QUESTIONS, strict=True) if pair[0])
        try:
            done = subprocess.run([*command, job], capture_output=True, text=True, check=True, timeout=timing.SCHEDULER)
            left = read(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
            return None
        return left if left is not None and math.isfinite(left) else None

    def believe(self, end: float) -> None:
        self.end, self.can_ask = end, False


class SaveTimes:
    """How long this process has saved, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0  # save, in the background too
        self.total = 0.0  # of what the program has waited for

    @contextlib.contextmanager
    def timed(self, *, in_background: bool = False) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.longest = max(self.longest, seconds)
            self.total += 0.0 if in_background else seconds


_saves = SaveTimes()


def saves() -> SaveTimes:
    return _saves


@puts_back
def _forget_saves() -> None:
    _saves.longest = _saves.total = 0.0


def margin(environ: Mapping[str, str]) -> float | None:
    """Return how many seconds before the end the job has to stop; None where that is to be measured."""
    text = environ.get(MARGIN)
    return None if not text else _seconds(MARGIN, text)


def _told(environ: Mapping[str, str]) -> float | None:
    return next((_seconds(name, environ[name]) for name in _TOLD_BY if environ.get(name)), None)


def _seconds(name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < threading.TIMEOUT_MAX:
            return seconds
    raise ValueError(f"{name} must be a number of seconds, got {text!r}. Mend it, or unset it.")
