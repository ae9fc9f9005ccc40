"""Handing a job script to the program that runs it: a scheduler, or bash where there is none."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from distman._cli.launch.job_script import as_argument, quoted

_SCHEDULERS = {"slurm": ("sbatch",), "pbs": ("qsub",), "lsf": ("bsub",), "flux": ("flux", "batch")}
_READS_STANDARD_INPUT = {"lsf"}
_JOB_IDS = {
    "slurm": re.compile(r"Submitted batch job (\d+)"),
    "lsf": re.compile(r"Job <(\d+)>"),
    "pbs": re.compile(r"^(\S+)$", re.MULTILINE),
    "flux": re.compile(r"^(\S+)$", re.MULTILINE),
}


def is_scheduled(backend: str) -> bool:
    """Return whether a scheduler takes the scripts of this backend; else bash runs them here."""
    return backend in _SCHEDULERS


def submission_line(backend: str, script: Path) -> str:
    """Return the command line that submits the script, or runs it."""
    words = shlex.join([*_SCHEDULERS.get(backend, ("bash",))])
    return f"{words} {'< ' * (backend in _READS_STANDARD_INPUT)}{quoted(as_argument(str(script)))}"


def submit(backend: str, script: Path) -> subprocess.CompletedProcess[str]:
    """Submit the script, or run it to its end; a scheduler's answer is kept, everything else is printed as it comes."""
    command = [*_SCHEDULERS.get(backend, ("bash",))]
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(
            f"{command[0]} must be installed to submit a job, got no such program. Run this where it is, such as on a "
            f"login node: {submission_line(backend, script)}"
        )
    output = subprocess.PIPE if is_scheduled(backend) else None
    if backend in _READS_STANDARD_INPUT:
        with script.open(encoding="utf-8") as file:
            return subprocess.run(command, stdin=file, stdout=output, text=True, check=False)
    return subprocess.run([*command, as_argument(str(script))], stdout=output, text=True, check=False)


def job_id_in(backend: str, answer: str) -> str | None:
    found = _JOB_IDS[backend].search(answer) if backend in _JOB_IDS else None
    return found[1] if found else None
