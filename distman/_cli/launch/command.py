"""``distman launch``: write the job script for a scheduler or launcher."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from distman._base.private_files import create_anew, open_itself
from distman._base.text import printable
from distman._cli.launch.job_script import BACKENDS, JobRequest, as_argument, quoted, read_time, render
from distman._cli.output import complain
from distman._cli.parser import add_number

_DEFAULTS = JobRequest(backend="slurm")
# Backends whose scripts a scheduler takes, with its command; scripts of others are run by bash.
_SCHEDULERS = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub <", "flux": "flux batch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the script that starts a job of one process for each GPU."
    parser.usage = "distman launch --backend BACKEND [options]\n                      [script.py [arguments]]"
    backends = [*BACKENDS, "mpi"]
    backend_help = f"what starts the processes: {', '.join(backends)}"
    parser.add_argument("--backend", required=True, choices=backends, metavar="BACKEND", help=backend_help)
    parser.add_argument("--with-torchrun", action="store_true", help="let srun start one torchrun on each node")
    gpus_help = "GPUs of each node, and as many processes (%(default)s); 0 for a job on CPUs"
    add_number(parser, "--nodes", least=1, default=_DEFAULTS.nodes, help="number of nodes (%(default)s)")
    add_number(parser, "--gpus-per-node", least=0, default=_DEFAULTS.gpus_per_node, help=gpus_help)
    add_number(parser, "--tasks-per-node", least=1, help="processes on each node of a job on CPUs (1)")
    parser.add_argument("--gpu-type", metavar="NAME", help="what Slurm calls the GPUs, such as a100")
    cpus_help = "CPUs for each process (%(default)s)"
    add_number(parser, "--cpus-per-task", least=1, default=_DEFAULTS.cpus_per_task, help=cpus_help)
    time_help = "longest time: 90m, 2h30m, 1d, HH:MM:SS, or as Slurm has it (%(default)s)"
    parser.add_argument("--time", default=_DEFAULTS.time, help=time_help)
    spare_help = "nodes that wait for one to fail, see `distman keep`"
    add_number(parser, "--spare-nodes", least=0, default=0, metavar="K", help=spare_help)
    add_number(parser, "--restarts", least=0, help="let `distman keep` start the job again when it fails")
    parser.add_argument("--account", metavar="NAME", help="the account that pays")
    parser.add_argument("--partition", metavar="NAME", help="partition, or queue")
    parser.add_argument("--job-name", default=_DEFAULTS.job_name, metavar="NAME", help="name of the job (%(default)s)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the script into this file; without it, print it"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, not a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script and its arguments (train.py)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, 1 where the file cannot be written, or 2 for wrong options."""
    try:
        request = _request(arguments)
    except ValueError as error:
        complain("launch", error)
        return 2
    path = arguments.output
    script = render(request, path and path.name)
    try:
        if path is not None:
            _write(path, script, force=arguments.force)
    except OSError as error:
        return complain("launch", error)
    _report(arguments, request, path, script)
    return 0


def _request(arguments: argparse.Namespace) -> JobRequest:
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(JobRequest)}
    given["backend"] = "openmpi" if arguments.backend == "mpi" else arguments.backend
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    given["program"] = ("-m", *program) if arguments.is_module else tuple(program) or _DEFAULTS.program
    given["time"] = read_time(arguments.time)
    return JobRequest(**given)


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


def _report(arguments: argparse.Namespace, request: JobRequest, path: Path | None, script: str) -> None:
    scheduler = _SCHEDULERS.get(request.backend)
    line = f"{scheduler or 'bash'} {quoted(as_argument(str(path or request.file_name)))}"
    if arguments.json:
        file = None if path is None else str(path)
        print(json.dumps({"backend": request.backend, "file": file, "submit": line, "script": script}, indent=2))
    elif path is None:
        print(script, end="")
    else:
        print(f"{printable(str(path))} is written{'. Submit it' if scheduler else ''}: {line}")
