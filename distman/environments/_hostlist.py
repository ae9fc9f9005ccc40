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

MAX_RANGE = 65_536  # numbers in one range; Slurm's own limit

MAX_ENTRIES = 1_048_576  # entries in one whole list, so that a mistyped range cannot fill the memory

_HOST = re.compile(r"(?:[^\s,\[\]()]|\[[^\[\]()]*\])+")
_SEPARATORS = re.compile(r"[\s,]*")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(rf"\s*(\d{{1,{MAX_DIGITS}}})(?:-(\d{{1,{MAX_DIGITS}}}))?\s*", re.ASCII)
_TASKS = re.compile(rf"\s*(\d{{1,{MAX_DIGITS}}})(?:\(x(\d{{1,{MAX_DIGITS}}})\))?\s*", re.ASCII)


def parse_hostlist(text: str) -> list[str]:
    """Return the hosts that a Slurm host list names, in its order, repetitions kept.

    Source:
        Slurm, ``scontrol show hostnames`` and ``src/common/hostlist.c``.
    """
    return list(_hosts(text))


def first_host(text: str) -> str:
    return next(_hosts(text))


def _hosts(text: str) -> Iterator[str]:
    names = _HOST.findall(text)
    if not names or _SEPARATORS.fullmatch(_HOST.sub("", text)) is None:
        raise _invalid(text, "it names no host, or has a bracket too many")
    # Around the brackets of a name are plain texts, and in each bracket are numbers.
    pieces = [_BRACKET.split(name) for name in names]
    numbers = [[_numbers(bracket, text) for bracket in parts[1::2]] for parts in pieces]
    if sum(math.prod(map(len, brackets)) for brackets in numbers) > MAX_ENTRIES:
        raise _invalid(text, f"it has more than {MAX_ENTRIES:,} entries")
    hosts = (_expand(parts[::2], brackets) for parts, brackets in zip(pieces, numbers, strict=True))
    return itertools.chain.from_iterable(hosts)


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node, as ``SLURM_TASKS_PER_NODE`` says it; see the manual of sbatch."""
    matches = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if len(counts) < len(matches) or sum(nodes for _, nodes in counts) > MAX_ENTRIES:
        raise LaunchEnvironmentError(
            f"tasks per node must look like '2(x3),1', got {_shown(text)}. Correct or unset the variable."
        )
    return [tasks for tasks, nodes in counts for _ in range(nodes)]


def _numbers(bracket: str, text: str) -> list[str]:
    """Return the numbers of a bracket; shorter ones are padded with zeros to the digits of the first of their range."""
    numbers: list[str] = []
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= high - low < MAX_RANGE:
            raise _invalid(text, f"{_shown(part)} is not a number, nor a range of at most {MAX_RANGE:,} numbers")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


def _expand(texts: list[str], brackets: list[list[str]]) -> Iterator[str]:
    """Return the hosts of one name, in Slurm's order: the last bracket runs fastest, then the first, the second, ..."""
    *leading, fastest = brackets or [[""]]
    for choice in itertools.product(*reversed(leading), fastest):
        numbers = (*reversed(choice[:-1]), choice[-1])
        yield "".join(itertools.chain.from_iterable(itertools.zip_longest(texts, numbers, fillvalue="")))


def _invalid(text: str, reason: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"host list must look like 'n[1-3,7],m3', got {_shown(text)}: {reason}. Correct or unset the variable."
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
