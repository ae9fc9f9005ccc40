"""``distman bench``: how long collectives take for messages of many sizes, as a table, files and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distman.cli.output import progress_bar
from distman.cli.speed_table import is_plain_under, print_speeds
from distman.cli.sweep_files import SUFFIXES, check_outputs, write_output
from distman.cli.units import parse_size, show_size
from distman.errors import DistmanError, RankFailedError

if TYPE_CHECKING:
    from distman.cli.timing import Measurement
    from distman.manager import DistributedManager

__all__ = ["NAMES", "add_parser", "run", "sizes_between", "sweep"]

NAMES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "p2p", "reduce_scatter")
_DEFAULT = ("all_reduce", "all_gather", "all_to_all", "p2p")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser.

    Local.
    """
    parser = subparsers.add_parser(
        "bench",
        help="measure collectives over message sizes",
        description="Run it as you run your script, for example: srun -N2 -n4 python -m distman bench --max-size 1G",
    )
    parser.add_argument("--operations", nargs="+", choices=NAMES, default=_DEFAULT, metavar="NAME", help=f"of {NAMES}")
    parser.add_argument("--min-size", type=_size, default=8, metavar="SIZE", help="smallest size, such as 8 or 1k")
    parser.add_argument("--max-size", type=_size, default=64 << 20, metavar="SIZE", help="largest size, such as 64M")
    parser.add_argument("--factor", type=_number, default=2, metavar="N", help="each size is N times the one before")
    parser.add_argument("--rounds", type=_number, metavar="N", help="rounds of each; 5 to 100 in 0.2 s, if not given")
    parser.add_argument(
        "--output", nargs="+", action="extend", type=Path, default=[], metavar="FILE", help=f"ends in {SUFFIXES}"
    )
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument("--timeout", type=float, help="seconds to wait for all ranks, and in each operation")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; rank 0 prints, and writes the files.

    Collective.

    Returns:
        The exit code: 0, or 1 where ranks are missing, there is one only, or files cannot be written.
    """
    from distman.decorators import on_rank
    from distman.manager import DistributedManager

    try:
        manager = DistributedManager.initialize(
            method=arguments.method, rendezvous_timeout=arguments.timeout, timeout=arguments.timeout
        )
    except (DistmanError, ValueError) as error:
        return _refuse(str(error))
    try:
        sizes = sizes_between(arguments.min_size, arguments.max_size, arguments.factor)
        on_rank(0)(check_outputs)(arguments.output)
    except (RankFailedError, ValueError) as error:
        return _refuse(str(error.__cause__ or error)) if manager.is_main else 1
    if manager.world_size == 1:
        return _refuse("one rank has nobody to talk to. Start several with torchrun, mpirun or srun.")
    try:
        measurements = sweep(arguments.operations, sizes, manager, num_rounds=arguments.rounds)
        if manager.is_main:
            print_speeds(measurements, is_plain=is_plain_under(manager.initialization_method))
            for path in arguments.output:
                write_output(path, measurements, _describe(manager))
    except RankFailedError as error:
        return _refuse(str(error).splitlines()[0]) if manager.rank < 2 else 1  # rank 0 may be the one that failed
    except OSError as error:
        return _refuse(f"the files must be written, got {error}. What was measured stands above.")
    manager.cleanup()
    return 0


def sweep(
    operations: Sequence[str], sizes: Sequence[int], manager: DistributedManager, *, num_rounds: int | None = None
) -> list[Measurement]:
    """Return how long operations take, for each operation and size.

    Collective. A bar on rank 0's terminal shows where it is.

    Args:
        operations: Names, of :data:`NAMES`.
        sizes: Sizes in bytes.
        manager: The manager.
        num_rounds: See :func:`distman.cli.timing.measure`.
    """
    from distman.cli.timing import measure

    measurements = []
    with progress_bar(len(operations) * len(sizes), is_shown=manager.is_main) as begin:
        for operation in operations:
            for num_bytes in sizes:
                begin(f"{operation} {show_size(num_bytes)}")
                measurements.append(measure(operation, num_bytes, manager, num_rounds=num_rounds))
    return measurements


def sizes_between(smallest: int, largest: int, factor: int) -> list[int]:
    """Return sizes, each so many times the one before.

    Local.

    Raises:
        ValueError: The largest is smaller than the smallest.

    >>> sizes_between(8, 100, 2)
    [8, 16, 32, 64]
    """
    if largest < smallest:
        raise ValueError(
            f"--max-size must be at least --min-size, got {largest} and {smallest} bytes. Correct one of them."
        )
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


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


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 2, got {text!r}")
    return int(text)
