"""``distman bench``: how long collectives take for messages of many sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._base import timing
from distman._cli.output import complain, parse_size, print_speeds, show_size
from distman._cli.parser import add_job_options, add_number
from distman.errors import DistmanError, JobFailed

if TYPE_CHECKING:
    from distman._cli.timing import Measurement
    from distman.manager import DistributedManager


NAMES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "p2p", "reduce_scatter")
_DEFAULT = ("all_reduce", "all_gather", "all_to_all", "p2p")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure how long collectives take. Run it as you run your script, for example: srun -N2 -n4 python -m distman "
        "bench --max-size 1G"
    )
    parser.add_argument(
        "--operations", nargs="+", choices=NAMES, default=_DEFAULT, metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--min-size", type=parse_size, default=8, metavar="SIZE", help="smallest size, such as 8 or 1k")
    parser.add_argument(
        "--max-size", type=parse_size, default=64 << 20, metavar="SIZE", help="largest size, such as 64M"
    )
    add_number(parser, "--factor", least=2, default=2, help="each size is N times the one before")
    add_number(parser, "--rounds", least=1, help="rounds of each; 5 to 100 in 0.2 s, if not given")
    add_job_options(parser, "in each operation, 240")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 where ranks are missing or fail, or there is one only; rank 0 prints. Collective."""
    from distman._cli.own_job import explain, own_fault, start_job
    from distman._cli.timing import measure

    if arguments.max_size < arguments.min_size:
        arguments.parser.error(
            f"--max-size must be at least --min-size, got {arguments.max_size} and {arguments.min_size} bytes. "
            "Swap them."
        )
    try:
        manager = start_job(arguments.method, arguments.timeout, timing.BENCH_COLLECTIVE)
    except (DistmanError, ValueError) as error:
        return complain("bench", str(error))
    if manager.world_size == 1:
        return complain(
            "bench", "one rank has nobody to talk to. Add -n 2, or start several with torchrun, mpirun or srun."
        )
    sizes = [arguments.min_size]
    while sizes[-1] * arguments.factor <= arguments.max_size:
        sizes.append(sizes[-1] * arguments.factor)
    cases = cases_of(arguments.operations, sizes, manager.world_size)
    measurements: list[Measurement] = []
    try:
        for name, size in cases:
            measurements.append(measure(name, size, manager, num_rounds=arguments.rounds))
    # Whatever it is, what was measured is told first, and it is raised again if it is our own. That of another rank is
    # named, or it would be raised again in any case.
    except (JobFailed, Exception) as error:
        operation, num_bytes = cases[len(measurements)]
        reason = explain(error, "it", manager)
        _tell(measurements, arguments, manager)
        if manager.rank < 2:  # rank 0 may be the one that failed
            why = reason or own_fault(error, manager)
            complain("bench", f"{operation} of {show_size(num_bytes)} was not measured: {why}")
        if reason is None:
            raise  # the traceback is wanted, and the others hear of it
        return 1
    _tell(measurements, arguments, manager)
    manager.cleanup()
    return 0


def cases_of(operations: Sequence[str], sizes: Sequence[int], world_size: int) -> list[tuple[str, int]]:
    """Return what to measure, each once: sizes that the ranks cannot share out are rounded up, and may become equal."""
    from distman._cli.timing import rounded_up

    return [*dict.fromkeys((name, rounded_up(name, size, world_size)) for name in operations for size in sizes)]


def _tell(measurements: Sequence[Measurement], arguments: argparse.Namespace, manager: DistributedManager) -> None:
    if not manager.is_main or not measurements:
        return
    if not arguments.json:
        print_speeds(measurements)
        return
    said = {
        "num_ranks": manager.world_size,
        "num_nodes": manager.num_nodes,
        "backend": manager.backend,
        "device": manager.device.type,
        "measurements": [dataclasses.asdict(one) for one in measurements],
    }
    print(json.dumps(said), flush=True)
