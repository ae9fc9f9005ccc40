"""Slurm's compressed texts: lists of hosts, and numbers of tasks per node.

``node[001-003,007],gpu5`` names five hosts. Brackets may stand more than once in a name (``rack[1-2]n[1-4]``), and
text may follow the last one (``n[1-2]-ib``): Slurm 22.05 refuses that, newer releases accept it, and it has one
meaning only. Order and repetitions are kept, as ``scontrol show hostnames`` keeps them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from distman.environments._base import MAX_DIGITS
from distman.errors import LaunchEnvironmentError

MAX_RANGE = 65_536
"""Numbers in one range; Slurm's own limit."""

MAX_ENTRIES = 1_048_576
"""Entries in one whole list, so that a mistyped range cannot fill the memory."""

_HOST = re.compile(r"(?:[^\s,\[\]()]|\[[^\[\]()]*\])+")
_SEPARATORS = re.compile(r"[\s,]*")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(rf"(\d{{1,{MAX_DIGITS}}})(?:-(\d{{1,{MAX_DIGITS}}}))?", re.ASCII)
_TASKS = re.compile(rf"(\d{{1,{MAX_DIGITS}}})(?:\(x(\d{{1,{MAX_DIGITS}}})\))?", re.ASCII)

Range = tuple[int, int, int]
"""First number, last number, digits to which shorter numbers are padded with zeros."""


def parse_hostlist(text: str) -> list[str]:
    """Return the hosts that a Slurm host list names, in its order, repetitions kept.

    Source:
        Slurm, ``scontrol show hostnames`` and ``src/common/hostlist.c``.

    >>> parse_hostlist("node[08-10],gpu5")
    ['node08', 'node09', 'node10', 'gpu5']
    """
    names = [_pieces(name, text) for name in _split(text)]
    _check_size(sum(math.prod(_size(ranges) for ranges in brackets) for _, brackets in names), text)
    return [host for texts, brackets in names for host in _expand(texts, brackets)]


def first_host(text: str) -> str:
    """Return the first host of a Slurm host list, without expanding the rest.

    >>> first_host("node[08-10],gpu5")
    'node08'
    """
    names = [_pieces(name, text) for name in _split(text)]
    _check_size(sum(math.prod(_size(ranges) for ranges in brackets) for _, brackets in names), text)
    texts, brackets = names[0]
    return next(_expand(texts, [ranges[:1] for ranges in brackets]))


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node, from ``SLURM_STEP_TASKS_PER_NODE`` or ``SLURM_TASKS_PER_NODE``.

    Source:
        sbatch manual, SLURM_TASKS_PER_NODE.

    >>> parse_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    matches = [_TASKS.fullmatch(part.strip()) for part in text.split(",")]
    counts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if len(counts) < len(matches):
        raise LaunchEnvironmentError(
            f"tasks per node must look like '2(x3),1', got {_shown(text)}. Correct or unset the variable."
        )
    _check_size(sum(nodes for _, nodes in counts), text)
    return [tasks for tasks, nodes in counts for _ in range(nodes)]


def _split(text: str) -> list[str]:
    """The names of the list, unexpanded; commas inside brackets do not separate."""
    names = []
    position = _end_of(_SEPARATORS, text, 0)
    while position < len(text):
        end = _end_of(_HOST, text, position)
        if end == position:
            raise _invalid(text, f"{text[position]!r} at position {position} is not part of a name")
        names.append(text[position:end])
        position = _end_of(_SEPARATORS, text, end)
    if not names:
        raise _invalid(text, "there is no name in it")
    return names


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _pieces(name: str, text: str) -> tuple[list[str], list[list[Range]]]:
    """The plain texts around the brackets of a name, and the ranges in each bracket."""
    parts = _BRACKET.split(name)
    return parts[::2], [[_range(part, text) for part in bracket.split(",")] for bracket in parts[1::2]]


def _range(part: str, text: str) -> Range:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise _invalid(text, f"{_shown(part)} is not a number or a range")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise _invalid(text, f"the range {part.strip()} runs backwards")
    if high - low >= MAX_RANGE:
        raise _invalid(text, f"the range {part.strip()} has more than {MAX_RANGE:,} numbers")
    return low, high, len(match[1])


def _size(ranges: list[Range]) -> int:
    return sum(high - low + 1 for low, high, _ in ranges)


def _expand(texts: list[str], brackets: list[list[Range]]) -> Iterator[str]:
    """The hosts of one name, in Slurm's order: the last bracket runs fastest, then the first, the second, ..."""
    if not brackets:
        return iter(texts)
    *leading, fastest = brackets
    choices = itertools.product(*(_numbers(ranges) for ranges in reversed(leading)), _numbers(fastest))
    return (_join(texts, (*reversed(choice[:-1]), choice[-1])) for choice in choices)


def _numbers(ranges: list[Range]) -> list[str]:
    return [f"{number:0{width}}" for low, high, width in ranges for number in range(low, high + 1)]


def _join(texts: list[str], numbers: tuple[str, ...]) -> str:
    return texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True))


def _check_size(entries: int, text: str) -> None:
    if entries > MAX_ENTRIES:
        raise _invalid(text, f"it has {entries:,} entries, more than {MAX_ENTRIES:,}")


def _invalid(text: str, reason: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"host list must look like 'n[1-3,7],m3', got {_shown(text)}: {reason}. Correct or unset the variable."
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
