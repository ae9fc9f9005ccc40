"""Asking Slurm to run the job again, after a preemption say."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from distman.errors import DistmanError

__all__ = ["requeue"]

_PATIENCE = 30.0


def requeue(environ: Mapping[str, str]) -> None:
    """Put the Slurm job of these variables back into the queue; Slurm ends what still runs of it.

    Local.

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
    command = ["scontrol", "requeue", environ.get("SLURM_ARRAY_JOB_ID", job)]
    if "SLURM_ARRAY_TASK_ID" in environ:
        command[-1] += f"_{environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistmanError(
            f"{' '.join(command)} must run on rank 0's host, got {error}. Install Slurm's clients."
        ) from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()
        raise DistmanError(f"{' '.join(command)} must succeed, got {reason!r}. Submit with sbatch --requeue.")
