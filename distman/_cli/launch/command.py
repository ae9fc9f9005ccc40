"""``distman launch``: write the job script for a scheduler or launcher, and submit it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from distman._base.private_files import create_anew, open_itself
from distman._base.text import printable
from distman._cli.launch.job_script import BACKENDS, JobRequest, as_argument, quoted, read_time, render
from distman._cli.parser import at_least

_DESCRIPTION = "Write the script that starts a job of one process for each GPU, and submit it to the scheduler."
_DEFAULTS = JobRequest(backend="slurm")
_SCHEDULERS = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub <", "flux": "flux batch"}
"""Backends whose scripts a scheduler takes, with its command; scripts of others are run here by bash."""

_JOB_IDS = {
    "slurm": re.compile(r"Submitted batch job (\d+)"),
    "lsf": re.compile(r"Job <(\d+)>"),
    "pbs": re.compile(r"^(\S+)$", re.MULTILINE),
    "flux": re.compile(r"^(\S+)$", re.MULTILINE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.usage = "distman launch --backend BACKEND [options]\n                      [script.py [arguments]]"
    backends = [*BACKENDS, "mpi"]
    parser.add_argument(
        "--backend",
        required=True,
        choices=backends,
        metavar="BACKEND",
        help=f"what starts the processes: {', '.join(backends)}",
    )
    parser.add_argument("--with-torchrun", action="store_true", help="let srun start one torchrun on each node")
    parser.add_argument(
        "--nodes", type=at_least(1), default=_DEFAULTS.nodes, metavar="N", help="number of nodes (%(default)s)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=at_least(0),
        default=_DEFAULTS.gpus_per_node,
        metavar="N",
        help="GPUs of each node, and as many processes (%(default)s); 0 for a job on CPUs",
    )
    parser.add_argument(
        "--tasks-per-node", type=at_least(1), metavar="N", help="processes on each node of a job on CPUs (1)"
    )
    parser.add_argument("--gpu-type", metavar="NAME", help="what Slurm calls the GPUs, such as a100")
    parser.add_argument(
        "--cpus-per-task",
        type=at_least(1),
        default=_DEFAULTS.cpus_per_task,
        metavar="N",
        help="CPUs for each process (%(default)s)",
    )
    parser.add_argument(
        "--time",
        default=_DEFAULTS.time,
        help="longest time: 90m, 2h30m, 1d, HH:MM:SS, or as Slurm has it (%(default)s)",
    )
    parser.add_argument(
        "--spare-nodes",
        type=at_least(0),
        default=0,
        metavar="K",
        help="nodes that wait for one to fail, see `distman keep`",
    )
    parser.add_argument(
        "--restarts", type=at_least(0), metavar="N", help="let `distman keep` start the job again when it fails"
    )
    parser.add_argument("--account", metavar="NAME", help="the account that pays")
    parser.add_argument("--partition", metavar="NAME", help="partition, or queue")
    parser.add_argument("--job-name", default=_DEFAULTS.job_name, metavar="NAME", help="name of the job (%(default)s)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the script into this file; without it, print it"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--submit", action="store_true", help="submit it, or run it where there is no scheduler")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, not a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script and its arguments (train.py)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, 1 where file or scheduler are not as they must be, 2 for wrong options, or the code of the job."""
    try:
        request = _request(arguments)
    except ValueError as error:
        return _complain(error, code=2)
    path = arguments.output
    if path is None and arguments.submit:
        path = Path(request.file_name)
    script = render(request, path and path.name)
    try:
        if path is not None:
            _write(path, script, force=arguments.force)
        if not arguments.submit:
            _report(arguments, request, path, script)
            return 0
        return _submit(arguments, request, path, script)
    except OSError as error:
        return _complain(error, code=1)


def _request(arguments: argparse.Namespace) -> JobRequest:
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(JobRequest)}
    given["backend"] = "openmpi" if arguments.backend == "mpi" else arguments.backend
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    given["program"] = ("-m", *program) if arguments.is_module else tuple(program) or _DEFAULTS.program
    given["time"] = read_time(arguments.time)
    request = JobRequest(**given)
    runs_here = arguments.submit and request.backend not in _SCHEDULERS
    if runs_here and arguments.json:
        raise ValueError(
            f"--json must not be combined with --submit for {request.backend}, got both. The job runs here and prints "
            "its own output."
        )
    if runs_here and request.backend == "torchrun" and request.nodes > 1:
        raise ValueError(
            f"--submit must be used with one node for torchrun, got {request.nodes} nodes. Run the script on each of "
            "them."
        )
    return request


def _write(path: Path, script: str, *, force: bool) -> None:
    """Write the file, which its owner can run and nobody else can read: a command line may hold a token."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = create_anew(path, 0o700) if force else open_itself(path, flags, 0o700)
    except FileExistsError as error:
        raise FileExistsError(
            f"{path} must not exist yet, but it does. Choose another name, or pass --force."
        ) from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(script)


def _submit(arguments: argparse.Namespace, request: JobRequest, path: Path, script: str) -> int:
    """Submit the script and tell the job's id, or run it to its end; return the exit code."""
    line = _submission_line(request.backend, path)
    scheduler = _SCHEDULERS.get(request.backend)
    program = line.split()[0]
    if shutil.which(program) is None:
        raise FileNotFoundError(
            f"{program} must be installed to submit a job, got no such program. Run this where it is, such as on a "
            f"login node: {line}"
        )
    finished = subprocess.run(
        ["/bin/bash", "-c", line], stdout=subprocess.PIPE if scheduler else None, text=True, check=False
    )
    if scheduler and finished.returncode != 0 and not arguments.force:
        path.unlink()  # made a moment ago; it would only be in the way of the next try
    if scheduler and finished.returncode == 0:
        job_id = job_id_in(request.backend, finished.stdout)
        if arguments.json:
            _report(arguments, request, path, script, job_id=job_id)
        else:
            print(job_id or finished.stdout.strip())
    return finished.returncode


def _submission_line(backend: str, script: Path) -> str:
    """Return the line of a shell that submits the script, or runs it."""
    return f"{_SCHEDULERS.get(backend, 'bash')} {quoted(as_argument(str(script)))}"


def job_id_in(backend: str, answer: str) -> str | None:
    found = _JOB_IDS[backend].search(answer)
    return found[1] if found else None


def _report(
    arguments: argparse.Namespace, request: JobRequest, path: Path | None, script: str, *, job_id: str | None = None
) -> None:
    line = _submission_line(request.backend, path or Path(request.file_name))
    if arguments.json:
        file = None if path is None else str(path)
        answer = {"backend": request.backend, "file": file, "submit": line, "job_id": job_id, "script": script}
        print(json.dumps(answer, indent=2))
    elif path is None:
        print(script, end="")
    else:
        print(f"{printable(str(path))} is written{'. Submit it' * (request.backend in _SCHEDULERS)}: {line}")


def _complain(error: Exception, *, code: int) -> int:
    print(f"distman launch: {printable(str(error))}", file=sys.stderr)
    return code
