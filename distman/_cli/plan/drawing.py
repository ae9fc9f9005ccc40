"""A plan of groups as text: the tree, the ranks of groups, and the grid on which the ranks lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from distman.topology import Partition, ProcessGroupConfig, Spread

_SHOWN_RUNS = 4  # runs of ranks in a line; a line of a terminal holds no more
# Ranks and columns up to which a grid of all ranks is drawn: it has to fit on a screen of 80 columns.
_MAX_GRID_RANKS = 64
_MAX_GRID_COLUMNS = 16


def draw_tree(config: ProcessGroupConfig) -> str:
    lines = list(_branches(config, config.root.name, "", ""))
    width = max(len(label) for label, _ in lines)
    digits = max(len(str(size)) for _, size in lines)
    return "\n".join(f"{label:<{width}}  {size:>{digits}}" for label, size in lines)


def _branches(config: ProcessGroupConfig, name: str, before: str, below: str) -> Iterator[tuple[str, int]]:
    yield before + name, config.get_node(name).size or 1
    children = config.children(name)
    for child in children:
        is_last = child is children[-1]
        yield from _branches(
            config, child.name, below + ("└── " if is_last else "├── "), below + ("    " if is_last else "│   ")
        )


def shorten_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as a short text, such as ``0-3``, ``0, 64, 128, ..., 960`` or ``0-1, 8-9``."""
    runs = [
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
        for _, members in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
        for run in [[rank for _, rank in members]]
    ]
    if len(runs) > _SHOWN_RUNS:
        runs[_SHOWN_RUNS - 1 : -1] = ["..."]
    return ", ".join(runs)


def first_and_last(partition: Partition) -> tuple[str, str, str]:
    """Return the ranks of the first group, the second and the last, as short texts; empty where there are fewer."""
    groups = [shorten_ranks(block) for block in itertools.islice(partition.blocks(), 2)]
    if partition.num_blocks == 1:
        return groups[0], "", ""
    if partition.num_blocks == 2:
        return groups[0], "", groups[1]
    return groups[0], groups[1], shorten_ranks(partition.block_of(partition.world_size - 1))


def where(spread: Spread, group_size: int) -> str:
    """Return a phrase that says whether groups stay on one node."""
    each = "each " if spread.num_groups > 1 else ""
    if spread.is_on_one_node:
        return f"{each}within one node"
    nodes = "-".join(map(str, sorted({max(spread.min_nodes, 2), spread.max_nodes})))
    if spread.num_on_one_node:
        others = spread.num_groups - spread.num_on_one_node
        return f"{spread.num_on_one_node} within one node, {others} across {nodes} nodes"
    return f"{each}across {nodes} nodes" + (", one rank on each" if spread.min_nodes == group_size else "")


def grid_table(axes: Mapping[str, int], ranks_per_node: int | None) -> tuple[list[str], list[list[object]]] | None:
    """Return columns and rows that show every rank at its place on the axes; None if that says nothing or is large."""
    *outer, inner = axes or ("",)
    length = axes.get(inner, 1)
    if not outer or math.prod(axes.values()) > _MAX_GRID_RANKS or length > _MAX_GRID_COLUMNS:
        return None
    columns = [*outer, f"{inner} 0", *map(str, range(1, length)), *(["node"] if ranks_per_node else [])]
    rows: list[list[object]] = []
    for first, place in enumerate(itertools.product(*(range(axes[name]) for name in outer))):
        ranks = range(first * length, (first + 1) * length)
        nodes = sorted({rank // ranks_per_node for rank in ranks}) if ranks_per_node else []
        rows.append([*place, *ranks, *([shorten_ranks(nodes)] if nodes else [])])
    return columns, rows
