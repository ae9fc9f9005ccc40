"""One file that shows where every rank stands, written when one of them waits too long."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distman.control.inquiry import Answer
from distman.log import logger

__all__ = ["write_report"]


def write_report(
    reason: str, answers: Mapping[int, Answer], describe: Callable[[int], str], world_size: int, folder: Path
) -> None:
    """Write down where the ranks are, and log a line that says where to read it.

    Local. Ranks with equal stacks are shown together.

    Args:
        reason: Who waits where.
        answers: What the ranks answered.
        describe: Says who a rank is.
        world_size: Number of ranks.
        folder: Where the file goes; the temporary folder, if it cannot be written there.
    """
    silent = [rank for rank in range(world_size) if rank not in answers]
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        by_place.setdefault((_without_seconds(answer.waiting), answer.stacks), []).append(rank)
    parts = [
        reason,
        *(f"{describe(rank)} did not answer: it is stopped, dead, or holds the interpreter" for rank in silent),
    ]
    for (waiting, text), ranks in sorted(by_place.items(), key=lambda item: len(item[1])):
        parts.append(f"{_named(ranks, describe)}\n{waiting or 'has not waited for others yet'}\n\n{text.rstrip()}")
    path = _write("\n\n".join(parts) + "\n", folder)
    elsewhere = min(by_place.items(), key=lambda item: len(item[1]), default=None)
    hint = f"; {_named(elsewhere[1], describe)}: {elsewhere[0][0]}" if elsewhere and len(by_place) > 1 else ""
    logger.warning("%s%s. The stacks of all ranks are in %s", reason, hint, path)


def _write(text: str, folder: Path) -> Path:
    name = f"distman-hang-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.txt"
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            (place / name).write_text(text, encoding="utf-8")
        except OSError:
            continue
        return place / name
    return Path("no file: neither folder can be written")


def _named(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    if len(ranks) <= 4:
        return ", ".join(map(describe, ranks))
    return f"{describe(ranks[0])} and {len(ranks) - 1} more: ranks {', '.join(map(str, ranks[1:]))}"


def _without_seconds(waiting: str) -> str:
    return waiting.rpartition(" for ")[0] if waiting.endswith(" s") else waiting
