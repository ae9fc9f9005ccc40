"""``distman check``: start the job that a launcher started, and find out what is wrong with the cluster."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

from distman._base import timing
from distman._cli.check.findings import Findings, as_json, facts, problems, warnings
from distman._cli.diagnostics import Host, diagnose
from distman._cli.output import print_speeds, print_table, print_text
from distman._cli.parser import add_job_options
from distman._job.meeting.secret import find_protection, learn_protection
from distman.environments import LaunchEnvironment, detect
from distman.errors import JobFailed

if TYPE_CHECKING:
    from distman._job.meeting.peers import Peer
    from distman.manager import DistributedManager


_COLUMNS = ("rank", "host", "pid", "node", "local rank", "device", "launcher", "torch", "distman")
_SIZES = (8, 64 << 10, 4 << 20)  # bytes: bound by latency, in between, bound by bandwidth
_ALONE = "One process: no other rank to talk to. Add -n 2, or start it with torchrun, mpirun or srun to check a job."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Connect the ranks and look for what is wrong with the cluster. Run it as you run your script, for example: "
        "srun -N2 -n4 python -m distman check"
    )
    add_job_options(parser, "in each step, 60")
    parser.add_argument("--folder", type=_not_empty, metavar="DIR", help="a folder that all ranks must see")
    parser.add_argument("--quick", action="store_true", help="check this host alone, without a job, in seconds")
    parser.set_defaults(run=run)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"it must be a name, got {text!r}")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Return 0 where all ranks came, every collective was exact and all see the named folder, else 1. Collective."""
    if arguments.quick:
        return _check_host(is_json=arguments.json)
    from distman._cli.own_job import explain, first_line, own_fault, start_job

    environment: LaunchEnvironment | None = None
    try:
        environment = detect(os.environ, arguments.method).environment
        protection = find_protection(environment, os.environ)
        manager = start_job(arguments.method, arguments.timeout, timing.CHECK_COLLECTIVE)
    except (JobFailed, RuntimeError, ValueError) as error:  # gloo's own among them
        if isinstance(error, JobFailed):
            error.acknowledge()
        causes = diagnose(os.environ, environment, Host()) if environment and not environment.local_rank else ()
        told = first_line(error) if isinstance(error, JobFailed) else str(error)
        for sentence in (told, *causes):
            print(f"distman check: {sentence}", file=sys.stderr)
        if arguments.json and (environment is None or environment.rank == 0):
            _tell_without_job(told, environment)
        return 1
    if manager.is_main:
        protection = learn_protection(protection, environment, os.environ)
    findings = Findings(manager.roll_call, manager.backend, manager.initialization_method, protection)
    if manager.is_main and not arguments.json:
        print_table(_COLUMNS, [_row(peer) for peer in findings.peers])
    try:
        _examine(manager, environment, findings, arguments.folder)
    # Whatever it is, what was found is told first, and it is raised again if it is our own. That of another rank is
    # named, or it would be raised again in any case.
    except (JobFailed, Exception) as error:
        reason = explain(error, f"the step {findings.step!r}", manager)
        findings.error = reason or own_fault(error, manager)
        if reason is None:
            if manager.is_main:
                _tell(findings, is_json=arguments.json)
            raise  # the traceback is wanted, and the others hear of it
        if manager.rank == 1:  # rank 0 may be the one
            print(f"distman check: {findings.error}", file=sys.stderr)
    if manager.is_main:
        _tell(findings, is_json=arguments.json)
    if findings.error is None:
        manager.cleanup()
    return 1 if problems(findings) else 0


def _check_host(*, is_json: bool) -> int:
    from distman._cli.check.quick import problems_of_host
    from distman._coordination.failure.starter import count_oom_kills

    found, host = problems_of_host(with_gpus=True), socket.gethostname()
    if is_json:
        print(json.dumps({"host": host, "problems": found, "oom_kills": count_oom_kills(), "is_ok": not found}))
    else:
        print_text("\n".join(f"WRONG: {host} {problem}." for problem in found) or f"{host} is fine.")
    return 1 if found else 0


def _examine(
    manager: DistributedManager, environment: LaunchEnvironment, findings: Findings, folder: str | None
) -> None:
    """Take all steps, and fill in what they find; what is told about many ranks is filled in on rank 0 only."""
    from distman._cli.check.hosts import RankReport, look
    from distman._cli.check.network import measure_links
    from distman._cli.check.proofs import proofs_for, prove
    from distman._cli.check.shared_folder import check_folder
    from distman._cli.own_job import gather_reports
    from distman._cli.timing import measure, measure_compute

    def begin(step: str) -> None:
        findings.step = step
        manager.barrier(f"distman check: {step}")

    begin("hosts")
    report = look(environment, is_first=manager.local_rank == 0)
    findings.hosts = gather_reports(manager, "the hosts", report, RankReport) or []

    begin("collectives")
    exact = {name: prove(name, proof, manager) for name, proof in proofs_for(manager).items()}
    reports = gather_reports(manager, "the collectives", exact, dict[str, bool])
    by_rank = {manager.rank: exact} if reports is None else dict(enumerate(reports))
    findings.wrong = {name: [rank for rank, one in by_rank.items() if not one.get(name)] for name in exact}

    if manager.world_size > 1:
        begin("network")
        for operation in ("all_reduce", "p2p"):
            for num_bytes in _SIZES:
                findings.speeds.append(measure(operation, num_bytes, manager))
                if findings.speeds[-1].seconds > timing.CHECK_LONGEST_SPEED:
                    break
        begin("links")
        findings.links = measure_links(manager) or []

    begin("computing")
    findings.compute = gather_reports(manager, "computing", measure_compute(manager.device), float) or []

    begin("folders")
    seen = [check_folder(path, manager) for path in (".", *([folder] if folder else []))]
    findings.folders = [report for report in seen if report is not None]
    manager.barrier("distman check: end")


def _tell_without_job(problem: str, environment: LaunchEnvironment | None) -> None:
    known = {"world_size": environment.world_size, "initialization_method": environment.launcher} if environment else {}
    print(json.dumps({**known, "problems": [problem], "is_ok": False}), flush=True)


def _tell(findings: Findings, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(as_json(findings)), flush=True)
        return
    if findings.speeds:
        print()
        print_speeds(findings.speeds)
    warned = [f"warning: {sentence}" for sentence in warnings(findings)]
    wrong = [f"WRONG: {sentence}" for sentence in problems(findings)]
    alone = [_ALONE] if findings.backend is None else []
    print_text("\n".join(["", *warned, *facts(findings), *wrong, *alone]))


def _row(peer: Peer) -> tuple[str, ...]:
    place = (peer.rank, peer.host, peer.pid, peer.node_rank, peer.local_rank)
    return (*map(str, place), peer.device, peer.launcher, peer.torch, peer.distman)
