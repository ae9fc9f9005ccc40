"""One file that shows where every rank stands, written when one of them waits too long."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from distman._coordination.monitor.stack_query import Answer
from distman._log import logger

Key = TypeVar("Key")


_MAX_NAMED = 4


def write_report(reason: str, asker: int, answers: Mapping[int, Answer], names: Sequence[str], folder: Path) -> None:
    """Write down where the ranks are, and log a line that says where to read it.

    Ranks with equal stacks are shown together, the fewest first.

    Args:
        reason: Who waits where.
        asker: The rank that waits.
        answers: What the ranks answered, by rank; that of the asker among them.
        names: Who each rank is.
        folder: Where the file goes; the temporary folder, if it cannot be written there.
    """
    silent = [rank for rank in range(len(names)) if rank not in answers]
    alike = _grouped(answers, lambda answer: (_without_seconds(answer.place), answer.stacks))
    parts = [
        reason,
        *(f"{names[rank]} does not answer: it is stopped or dead, or foreign code keeps it" for rank in silent),
    ]
    parts += [f"{_named(ranks, names)}\n{place}\n\n{stacks.rstrip()}" for (place, stacks), ranks in alike]
    path = _write("\n\n".join(parts) + "\n", folder)
    place_of_asker = _without_seconds(answers[asker].place)
    by_place = _grouped(answers, lambda answer: _without_seconds(answer.place))
    elsewhere = [f"{_named(ranks, names)} {place}" for place, ranks in by_place if place != place_of_asker]
    elsewhere += [f"{_named(silent, names)} without an answer"] if silent else []
    logger.warning("%s; %s. The stacks of all ranks are in %s", reason, "; ".join(elsewhere) or "all do", path)


def _grouped(answers: Mapping[int, Answer], key: Callable[[Answer], Key]) -> list[tuple[Key, list[int]]]:
    """Return the ranks with equal keys together, the smallest group first."""
    groups: dict[Key, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        groups.setdefault(key(answer), []).append(rank)
    return sorted(groups.items(), key=lambda group: len(group[1]))


def _write(text: str, folder: Path) -> Path:
    name = f"distman-hang-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.txt"
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            (place / name).write_text(text, encoding="utf-8")
        except OSError:
            continue
        return place / name
    return Path("no file: neither folder can be written")


def _named(ranks: Sequence[int], names: Sequence[str]) -> str:
    if len(ranks) <= _MAX_NAMED:
        return ", ".join(names[rank] for rank in ranks)
    return f"{names[ranks[0]]} and {len(ranks) - 1} more ({', '.join(map(str, ranks[1:]))})"


def _without_seconds(place: str) -> str:
    return place.rpartition(" for ")[0] if place.endswith(" s") else place
