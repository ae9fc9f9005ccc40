"""``distman check``: start the job that a launcher started, and find out what is wrong with the cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from distman._cli.arguments import not_empty
from distman._cli.check.findings import Findings, as_json, facts, problems, warnings
from distman._cli.output import print_table, print_text, progress_bar
from distman._cli.speed_table import is_plain_under, print_speeds
from distman._job.meeting.secret import find_protection, learn_protection
from distman.environments import detect
from distman.errors import DistmanError, JobFailed

if TYPE_CHECKING:
    from distman._cli.timing import Measurement
    from distman._job.meeting.peers import Peer
    from distman.manager import DistributedManager


_COLUMNS = ("rank", "host", "pid", "node", "local rank", "device", "launcher", "torch", "distman")
_SIZES = (8, 64 << 10, 4 << 20)  # bytes: bound by latency, in between, bound by bandwidth
_LONGEST_SPEED = 0.1  # seconds of one operation after which larger sizes are left out
_COLLECTIVE_TIMEOUT = 60.0  # seconds; a check that takes longer has found its answer
_ALONE = "One process: no other rank to talk to. Start it with torchrun, mpirun or srun to check a job."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Connect the ranks and look for what is wrong with the cluster. Run it as you run your script, for example: "
        "srun -N2 -n4 python -m distman check"
    )
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="time to wait for all ranks, 300, and in each step, 60"
    )
    parser.add_argument("--folder", type=not_empty, metavar="DIR", help="a folder that all ranks must see")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 where all ranks came, every collective was exact and all see the named folder, else 1. Collective."""
    from distman._cli.faults import explain, own_fault
    from distman._coordination.failure import hook
    from distman.manager import DistributedManager

    limit = arguments.timeout or _COLLECTIVE_TIMEOUT
    try:
        environment = detect(os.environ, arguments.method).environment
        protection = find_protection(environment, os.environ)
        manager = DistributedManager.initialize(
            method=arguments.method, rendezvous_timeout=arguments.timeout, timeout=limit
        )
        hook.expect_exits(1, 2)  # verdicts, which all ranks give
    except (DistmanError, ValueError) as error:
        print(f"distman check: {error}", file=sys.stderr)
        if arguments.json:
            _tell_without_job(str(error), arguments.method)
        return 1
    if manager.is_main:
        protection = learn_protection(protection, environment, os.environ)
    findings = Findings(manager.roll_call, manager.backend, manager.initialization_method, protection)
    if manager.is_main and not arguments.json:
        print_table(_COLUMNS, [_row(peer) for peer in findings.peers], is_plain=is_plain_under(findings.launcher))
    try:
        _examine(manager, findings, arguments.folder, limit)
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


def _examine(manager: DistributedManager, findings: Findings, folder: str | None, limit: float) -> None:
    """Take all steps, and fill in what they find; what is told about many ranks is filled in on rank 0 only."""
    steps = _steps(manager, findings, folder)
    with progress_bar(len(steps), is_shown=manager.is_main) as begin:
        for name, step in steps.items():
            begin(name)
            findings.step = name
            manager.barrier(f"distman check: {name}", timeout=limit)
            step()
    manager.barrier("distman check: end", timeout=limit)


def _steps(manager: DistributedManager, findings: Findings, folder: str | None) -> dict[str, Callable[[], None]]:
    from distman._cli.check.network import measure_clocks, measure_links
    from distman._cli.check.proofs import proofs_for, prove
    from distman._cli.check.reports import gather_reports
    from distman._cli.check.shared_folder import check_folder
    from distman._cli.timing import measure_compute

    def prove_all() -> None:
        exact = {name: prove(name, proof, manager) for name, proof in proofs_for(manager).items()}
        reports = gather_reports(manager, "the collectives", exact, dict[str, bool])
        by_rank = {manager.rank: exact} if reports is None else dict(enumerate(reports))
        findings.wrong = {name: [rank for rank, one in by_rank.items() if not one.get(name)] for name in exact}

    def time_compute() -> None:
        findings.compute = gather_reports(manager, "computing", measure_compute(manager.device), float) or []

    def time_links() -> None:
        findings.links = measure_links(manager) or []

    def compare_clocks() -> None:
        findings.clocks = measure_clocks(manager) or []

    def look_at_folders() -> None:
        for path in (".", *([folder] if folder else [])):
            report = check_folder(path, manager)
            findings.folders += [report] if report else []

    def time_speeds() -> None:
        for operation in ("all_reduce", "p2p"):
            _measure_speeds(operation, findings.speeds, manager)

    several = {"network": time_speeds, "links": time_links, "clocks": compare_clocks}
    return {
        "collectives": prove_all,
        **(several if manager.world_size > 1 else {}),
        "computing": time_compute,
        "folders": look_at_folders,
    }


def _measure_speeds(operation: str, speeds: list[Measurement], manager: DistributedManager) -> None:
    from distman._cli.timing import measure

    for num_bytes in _SIZES:
        speeds.append(measure(operation, num_bytes, manager))
        if speeds[-1].seconds > _LONGEST_SPEED:
            return


def _tell_without_job(problem: str, method: str | None) -> None:
    """Print the JSON object of a job whose ranks did not come together, unless this is surely not rank 0."""
    known: dict[str, object] = {}
    try:
        launched = detect(os.environ, method).environment
    except (DistmanError, ValueError):  # that may be the problem
        pass
    else:
        if launched.rank != 0:
            return
        known = {"world_size": launched.world_size, "initialization_method": launched.launcher}
    print(json.dumps({**known, "problems": [problem], "is_ok": False}), flush=True)


def _tell(findings: Findings, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(as_json(findings)), flush=True)
        return
    if findings.speeds:
        print()
        print_speeds(findings.speeds, is_plain=is_plain_under(findings.launcher))
    warned = [f"warning: {sentence}" for sentence in warnings(findings)]
    wrong = [f"WRONG: {sentence}" for sentence in problems(findings)]
    alone = [_ALONE] if findings.backend is None else []
    print_text("\n".join(["", *warned, *facts(findings), *wrong, *alone]))


def _row(peer: Peer) -> tuple[str, ...]:
    place = (peer.rank, peer.host, peer.pid, peer.node_rank, peer.local_rank)
    return (*map(str, place), peer.device, peer.launcher, peer.torch, peer.distman)
