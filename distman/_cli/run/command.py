"""``distman run``: start the ranks of a job on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from distman._base import timing
from distman._base.private_files import create_anew
from distman._cli.output import complain
from distman._cli.parser import add_number
from distman._cli.run.console import despite_closed_terminal
from distman._cli.run.function import program_of_rank
from distman._cli.run.job import OutputError, Plan, number_of_ranks, run_job
from distman._coordination.stop_signals import stop_signals
from distman.environments import detect
from distman.errors import DistmanError

_EPILOG = (
    "For several hosts, start the ranks with their launcher (srun, mpirun, torchrun); `distman launch` writes the job "
    "script."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distman run [options] script.py [arguments]\n       distman run [options] -m module [arguments]"
    parser.description = "Start the ranks of a job on this machine, and end them together."
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--ranks", default="auto", metavar="N", help="a number, gpu, cpu or auto (the default)")
    parser.add_argument(  # as mpirun and torchrun have it
        "-np", "--nproc-per-node", "--nproc_per_node", dest="ranks", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="a file for each rank; only rank 0 is shown")
    parser.add_argument("--tee", action="store_true", help="with --log-dir: show all ranks all the same")
    grace_help = f"from SIGTERM to SIGKILL, for ranks that save (default: {timing.RUN_GRACE:g})"
    add_number(parser, "--grace", least=0, default=timing.RUN_GRACE, metavar="SECONDS", help=grace_help)
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write how the ranks ended, as JSON, and do not print it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print how the ranks ended as one JSON object; all else on standard error"
    )
    parser.add_argument("--nnodes", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)  # of commands of which one rank prints
    parser.add_argument("--call", type=Path, help=argparse.SUPPRESS)  # of distman.run: the folder with the function
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, not a script")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, the code of the rank that failed first, 130 after Ctrl-C, or 1 where ranks could not be started."""
    plan = _plan(arguments)
    _warn_of_others()
    try:
        outcome = run_job(plan)
    except BrokenPipeError:
        raise  # the reader has what it wants
    except OutputError as error:
        return complain("run", f"writing what the ranks print failed: {str(error).rstrip('.')}. They have been ended.")
    except OSError as error:
        return complain("run", f"starting the ranks failed: {str(error).rstrip('.')}. None is left.")
    if arguments.json:
        print(outcome.to_json())
    elif outcome.exit_code and arguments.report is None:
        with despite_closed_terminal(sys.stderr):
            print(outcome.report(), file=sys.stderr, flush=True)
    try:
        if arguments.report is not None:
            with os.fdopen(create_anew(arguments.report), "w", encoding="utf-8") as file:
                file.write(outcome.to_json())
    except OSError as error:
        return max(outcome.exit_code, complain("run", f"writing the report failed: {str(error).rstrip('.')}."))
    return outcome.exit_code


def _warn_of_others() -> None:
    """Say that a launcher has started several of this command, each of which starts a job of its own."""
    try:
        around = detect(os.environ).environment
    except (DistmanError, ValueError):
        return
    if around.world_size > 1 and around.rank == 0:
        complain(
            "run",
            f"{around.launcher} has started {around.world_size} of these, and each starts a job of its own. Start one, "
            "or let the launcher start python itself.",
        )


def _plan(arguments: argparse.Namespace) -> Plan:
    error = arguments.parser.error
    if arguments.nnodes is not None:
        error(f"it starts ranks on this machine only. {_EPILOG}")
    command = _command(arguments)
    report: Path | None = arguments.report
    if report is not None and (report.is_dir() or report.is_symlink() or not report.absolute().parent.is_dir()):
        error(f"--report must be a file, and no link, in a folder that exists, got {report}")
    try:
        number = number_of_ranks(arguments.ranks)
        signals = stop_signals(os.environ)
    except ValueError as problem:
        error(str(problem))
    return Plan(
        command=command,
        num_ranks=number,
        log_dir=arguments.log_dir,
        shows_all=arguments.log_dir is None or arguments.tee,
        names_ranks=not arguments.bare,
        is_quiet=arguments.json,
        grace=arguments.grace,
        stop_signals=signals,
    )


def _command(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.call is not None:
        return program_of_rank(arguments.call)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        arguments.parser.error("name the script to start, or -m and a module")
    if arguments.is_module:
        return ("-m", *command)
    if Path(command[0]).name in ("python", "python3") and not Path(command[0]).exists():
        arguments.parser.error(f"leave out {command[0]!r}: each rank is started with this interpreter")
    if not Path(command[0]).exists():
        arguments.parser.error(f"there is no script {command[0]!r} here")
    return tuple(command)
