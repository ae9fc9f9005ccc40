"""Asking Slurm to run the job again, after a preemption say."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from distman._log import logger
from distman.errors import DistmanError

_PATIENCE = 30.0


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
        raise DistmanError(
            "the job must be one of Slurm's to be queued again, got no SLURM_JOB_ID. Submit it by sbatch."
        )
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
        raise DistmanError(f"{' '.join(command)} must succeed, got {reason!r}. Submit with sbatch --requeue.")


def _is_ending(name: str) -> bool:
    """Return whether Slurm ends the job: who cancels it does not want it back, who preempts it queues it himself."""
    return bool(re.search(r"\bJobState=COMPLETING\b", _run(["scontrol", "show", "job", "--oneliner", name]).stdout))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistmanError(
            f"{' '.join(command)} must run on rank 0's host, got {error}. Install Slurm's clients."
        ) from error
