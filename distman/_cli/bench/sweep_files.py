"""The files that ``distman bench`` writes: tables and a plot of a sweep over sizes."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distman._cli.output import PICTURES, check_output

if TYPE_CHECKING:
    from distman._cli.timing import Measurement


SUFFIXES = (".csv", ".json", *PICTURES)


def check_outputs(paths: Sequence[Path]) -> None:
    """Raise now what would keep the files from being written later."""
    for path in paths:
        check_output(path, SUFFIXES)


def write_output(path: Path, measurements: Sequence[Measurement], job: Mapping[str, Any]) -> None:
    """Write a sweep into a file, in the format that its ending says, with what is to be known of the job."""
    if path.suffix == ".csv":
        _write_csv(path, measurements, job)
    elif path.suffix == ".json":
        _write_json(path, measurements, job)
    else:
        _draw(path, measurements, job)


def as_json(measurements: Sequence[Measurement], job: Mapping[str, Any]) -> dict[str, Any]:
    return {**job, "measurements": [dataclasses.asdict(one) for one in measurements]}


def _write_csv(path: Path, measurements: Sequence[Measurement], job: Mapping[str, Any]) -> None:
    rows = [{**dataclasses.asdict(one), **job} for one in measurements]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, measurements: Sequence[Measurement], job: Mapping[str, Any]) -> None:
    text = json.dumps(as_json(measurements, job), indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


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
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="size")
        _mark_sizes(axes, [one.num_bytes for one in measurements])
        axes.grid(visible=True, which="major", alpha=0.3)
    left.legend(frameon=False)
    figure.suptitle(
        f"{job['num_ranks']} ranks, {job['num_nodes']} node{'s' * (job['num_nodes'] > 1)}, {job['device']} "
        f"({job['backend']})",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _mark_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Mark powers of two that people know: 1, 32 and 1,024 times 1 B, 1 KiB, 1 MiB and so on."""
    from distman._cli.units import show_size

    marks = [2**power for power in range(0, 45, 5) if min(sizes) <= 2**power <= max(sizes)] or [min(sizes)]
    axes.set_xticks(marks, [show_size(mark) for mark in marks], minor=False)
    axes.set_xticks([], minor=True)
