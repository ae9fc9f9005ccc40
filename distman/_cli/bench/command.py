"""``distman bench``: how long collectives take for messages of many sizes, as a table, files and a plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distman._cli.arguments import at_least
from distman._cli.bench.sweep_files import SUFFIXES, as_json, check_outputs, write_output
from distman._cli.output import progress_bar
from distman._cli.speed_table import is_plain_under, print_speeds
from distman._cli.units import parse_size, show_size
from distman.errors import DistmanError, JobFailed, RankFailedError

if TYPE_CHECKING:
    from distman._cli.timing import Measurement
    from distman.manager import DistributedManager


NAMES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "p2p", "reduce_scatter")
_DEFAULT = ("all_reduce", "all_gather", "all_to_all", "p2p")
_OPERATION_TIMEOUT = 240.0  # below the seconds of silence after which the watchers end the job, and lose the sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure how long collectives take. Run it as you run your script, for example: srun -N2 -n4 python -m distman "
        "bench --max-size 1G"
    )
    parser.add_argument(
        "--operations", nargs="+", choices=NAMES, default=_DEFAULT, metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--min-size", type=_size, default=8, metavar="SIZE", help="smallest size, such as 8 or 1k")
    parser.add_argument("--max-size", type=_size, default=64 << 20, metavar="SIZE", help="largest size, such as 64M")
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
        help=f"ends in {', '.join(SUFFIXES)}",
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
    from distman._cli.faults import explain, own_fault
    from distman._coordination.failure import hook
    from distman.decorators import on_rank
    from distman.manager import DistributedManager

    try:
        manager = DistributedManager.initialize(
            method=arguments.method,
            rendezvous_timeout=arguments.timeout,
            timeout=arguments.timeout or _OPERATION_TIMEOUT,
        )
        hook.expect_exits(1, 2)  # verdicts, which all ranks give
    except (DistmanError, ValueError) as error:
        return _refuse(str(error))
    try:
        sizes = sizes_between(arguments.min_size, arguments.max_size, arguments.factor)
        on_rank(0)(check_outputs)(arguments.output)
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
        measurements.extend(sweep(cases, manager, num_rounds=arguments.rounds))  # an error leaves those before it
    # Whatever it is, what was measured is told first, and it is raised again if it is our own. That of another rank is
    # named, or it would be raised again in any case.
    except (JobFailed, Exception) as error:
        operation, num_bytes = cases[len(measurements)]
        what = f"{operation} of {show_size(num_bytes)}"
        reason = explain(error, "it", manager)
        _tell(measurements, arguments, manager)
        if manager.rank < 2:  # rank 0 may be the one that failed
            _refuse(f"{what} was not measured: {reason or own_fault(error, manager)}")
        if reason is None:
            raise  # the traceback is wanted, and the others hear of it
        return 1
    code = _tell(measurements, arguments, manager)
    if code == 0:
        manager.cleanup()
    return code


def sweep(
    cases: Sequence[tuple[str, int]], manager: DistributedManager, *, num_rounds: int | None = None
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

    return list(
        dict.fromkeys((name, rounded_up(name, num_bytes, world_size)) for name in operations for num_bytes in sizes)
    )


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
    if arguments.json:
        print(json.dumps(as_json(measurements, _describe(manager))), flush=True)
    else:
        print_speeds(measurements, is_plain=is_plain_under(manager.initialization_method))
    try:
        for path in arguments.output:
            write_output(path, measurements, _describe(manager))
    except OSError as error:
        return _refuse(f"the files must be written, got {error}. What was measured stands above.")
    return 0


def _describe(manager: DistributedManager) -> dict[str, Any]:
    return {
        "num_ranks": manager.world_size,
        "num_nodes": manager.num_nodes,
        "backend": manager.backend,
        "device": manager.device.type,
    }


def _refuse(reason: str) -> int:
    print(f"distman bench: {reason}", file=sys.stderr)
    return 1


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
