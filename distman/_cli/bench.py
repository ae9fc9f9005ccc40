"""``distman bench``: how long collectives take for messages of many sizes, as a table, files and a plot."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distman._base import timing
from distman._cli.output import PICTURES, check_output, progress_bar
from distman._cli.parser import at_least
from distman._cli.units import parse_size, print_speeds, show_size
from distman.errors import DistmanError, JobFailed, RankFailedError

if TYPE_CHECKING:
    from distman._cli.timing import Measurement
    from distman.manager import DistributedManager


NAMES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "p2p", "reduce_scatter")
_DEFAULT = ("all_reduce", "all_gather", "all_to_all", "p2p")
_SUFFIXES = (".csv", ".json", *PICTURES)


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
    parser.add_argument(
        "--factor", type=at_least(2), default=2, metavar="N", help="each size is N times the one before"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), metavar="N", help="rounds of each; 5 to 100 in 0.2 s, if not given"
    )
    parser.add_argument(
        "--output",
        nargs="+",
        action="extend",
        type=Path,
        default=[],
        metavar="FILE",
        help=f"ends in {', '.join(_SUFFIXES)}",
    )
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time to wait for all ranks, 300, and in each operation, 240",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 where ranks are missing or fail, there is one only, or files cannot be written. Collective.

    Rank 0 prints and writes the files, also what was measured until something failed.
    """
    from distman._cli.own_job import explain, own_fault, start_job
    from distman.decorators import on_rank

    try:
        manager = start_job(arguments.method, arguments.timeout, timing.BENCH_COLLECTIVE)
    except (DistmanError, ValueError) as error:
        return _refuse(str(error))
    try:
        sizes = sizes_between(arguments.min_size, arguments.max_size, arguments.factor)
        for path in arguments.output:
            on_rank(0)(check_output)(path, _SUFFIXES)
    except (RankFailedError, ValueError, ImportError) as error:
        if manager.is_main:
            _refuse(str(error))
        kind = error.error_type if isinstance(error, RankFailedError) else type(error).__name__
        return 1 if kind == ImportError.__name__ else 2
    if manager.world_size == 1:
        return _refuse("one rank has nobody to talk to. Start several with torchrun, mpirun or srun.")
    cases = cases_of(arguments.operations, sizes, manager.world_size)
    measurements: list[Measurement] = []
    try:
        measurements.extend(_sweep(cases, manager, arguments.rounds))  # an error leaves those before it
    # Whatever it is, what was measured is told first, and it is raised again if it is our own. That of another rank is
    # named, or it would be raised again in any case.
    except (JobFailed, Exception) as error:
        operation, num_bytes = cases[len(measurements)]
        reason = explain(error, "it", manager)
        _tell(measurements, arguments, manager)
        if manager.rank < 2:  # rank 0 may be the one that failed
            why = reason or own_fault(error, manager)
            _refuse(f"{operation} of {show_size(num_bytes)} was not measured: {why}")
        if reason is None:
            raise  # the traceback is wanted, and the others hear of it
        return 1
    code = _tell(measurements, arguments, manager)
    if code == 0:
        manager.cleanup()
    return code


def _sweep(
    cases: Sequence[tuple[str, int]], manager: DistributedManager, num_rounds: int | None
) -> Iterator[Measurement]:
    """Yield how long operations take, one after another; a bar on rank 0's terminal shows where it is. Collective."""
    from distman._cli.timing import measure

    with progress_bar(len(cases), is_shown=manager.is_main) as begin:
        for operation, num_bytes in cases:
            begin(f"{operation} {show_size(num_bytes)}")
            yield measure(operation, num_bytes, manager, num_rounds=num_rounds)


def cases_of(operations: Sequence[str], sizes: Sequence[int], world_size: int) -> list[tuple[str, int]]:
    """Return what to measure, each once: sizes that the ranks cannot share out are rounded up, and may become equal."""
    from distman._cli.timing import rounded_up

    return [*dict.fromkeys((name, rounded_up(name, size, world_size)) for name in operations for size in sizes)]


def sizes_between(smallest: int, largest: int, factor: int) -> list[int]:
    """Return sizes, each so many times the one before.

    >>> sizes_between(8, 100, 2)
    [8, 16, 32, 64]
    """
    if largest < smallest:
        raise ValueError(f"--max-size must be at least --min-size, got {largest} and {smallest} bytes. Swap them.")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def _tell(measurements: Sequence[Measurement], arguments: argparse.Namespace, manager: DistributedManager) -> int:
    """Print and write on rank 0, and return the exit code."""
    if not manager.is_main or not measurements:
        return 0
    job = {
        "num_ranks": manager.world_size,
        "num_nodes": manager.num_nodes,
        "backend": manager.backend,
        "device": manager.device.type,
    }
    if arguments.json:
        print(json.dumps({**job, "measurements": [dataclasses.asdict(one) for one in measurements]}), flush=True)
    else:
        print_speeds(measurements, manager.initialization_method)
    try:
        for path in arguments.output:
            write_output(path, measurements, job)
    except OSError as error:
        return _refuse(f"the files must be written, got {error}. What was measured stands above.")
    return 0


def write_output(path: Path, measurements: Sequence[Measurement], job: Mapping[str, Any]) -> None:
    """Write a sweep into a file, in the format that its ending says, with what is to be known of the job."""
    rows = [dataclasses.asdict(one) for one in measurements]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], *job])
            writer.writeheader()
            writer.writerows({**row, **job} for row in rows)
    elif path.suffix == ".json":
        text = json.dumps({**job, "measurements": rows}, indent=1)
        path.write_text(f"{text}\n", encoding="utf-8")
    else:
        _draw(path, measurements, job)


def _draw(path: Path, measurements: Sequence[Measurement], job: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for operation in dict.fromkeys(one.operation for one in measurements):
        own = [one for one in measurements if one.operation == operation]
        sizes = [one.num_bytes for one in own]
        left.plot(sizes, [one.seconds * 1e6 for one in own], marker="o", markersize=3, label=operation)
        right.plot(sizes, [one.bus_bandwidth / 1e9 for one in own], marker="o", markersize=3, label=operation)
    left.set(ylabel="time (\N{MICRO SIGN}s)", title="time, median of the slowest rank")
    right.set(ylabel="bus bandwidth (GB/s)", title="bus bandwidth")
    # Powers of two that people know: 1, 32 and 1,024 times 1 B, 1 KiB, 1 MiB and so on.
    every = [one.num_bytes for one in measurements]
    marks = [2**power for power in range(0, 45, 5) if min(every) <= 2**power <= max(every)] or [min(every)]
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="size")
        axes.set_xticks(marks, [show_size(mark) for mark in marks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(visible=True, which="major", alpha=0.3)
    left.legend(frameon=False)
    figure.suptitle(
        f"{job['num_ranks']} ranks, {job['num_nodes']} node{'s' * (job['num_nodes'] > 1)}, {job['device']} "
        f"({job['backend']})",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _refuse(reason: str) -> int:
    print(f"distman bench: {reason}", file=sys.stderr)
    return 1
