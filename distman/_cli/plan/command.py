"""``distman plan``: draw the groups or the mesh of a job of any size, without its processes."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from distman._cli.output import print_table, print_text
from distman._cli.parser import at_least
from distman._cli.plan.layout import Layout, lay_out_mesh, lay_out_tree, shorten, where
from distman.topology import NotationError, Partition, ProcessGroupConfig, parse_mesh, parse_tree

_MAX_WORLD_SIZE = 10_000_000  # more ranks than any machine has; their groups still fit into memory


# Ranks and columns up to which a grid of all ranks is drawn: it has to fit on a screen of 80 columns.
_MAX_GRID_RANKS = 64
_MAX_GRID_COLUMNS = 16


class _UsageError(ValueError):
    """An argument is wrong: the exit code is 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distman plan --world-size RANKS\n                    (--tree TREE | --mesh MESH) [options]"
    parser.description = (
        "Draw the groups that create_groups_from_config() or initialize_mesh() would make; nothing is started. The "
        "exit code is 0, 1 where the plan does not fit the world, 2 where the arguments are wrong."
    )
    parser.add_argument("--world-size", type=at_least(1), required=True, metavar="RANKS", help="number of ranks")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--tree", help='such as "world(data=16, model(spatial=8, channel=8))"')
    wanted.add_argument("--mesh", help="such as data=-1,model=4; one length may be -1")
    parser.add_argument("--rank", type=int, default=0, help="show the groups that this rank is in (default 0)")
    parser.add_argument("--ranks-per-node", type=at_least(1), metavar="N", help="tell which groups cross nodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, 1 where the plan does not fit, or 2 where an argument is wrong."""
    try:
        layout = _read(arguments)
    except ValueError as error:
        print(f"distman plan: {error}", file=sys.stderr)
        return 2 if isinstance(error, (NotationError, _UsageError)) else 1
    if arguments.json:
        print(json.dumps(_as_json(layout, arguments.rank)))
    else:
        _print(layout, arguments.rank)
    return 0


def _read(arguments: argparse.Namespace) -> Layout:
    if arguments.world_size > _MAX_WORLD_SIZE:
        raise _UsageError(f"--world-size must be at most {_MAX_WORLD_SIZE}, got {arguments.world_size}. Lower it.")
    if not 0 <= arguments.rank < arguments.world_size:
        raise _UsageError(
            f"--rank must be at least 0 and below the world size {arguments.world_size}, got {arguments.rank}. "
            "Choose a rank of this world."
        )
    if arguments.tree is not None:
        return lay_out_tree(parse_tree(arguments.tree), arguments.world_size, arguments.ranks_per_node)
    return lay_out_mesh(parse_mesh(arguments.mesh), arguments.world_size, arguments.ranks_per_node)


def _as_json(layout: Layout, rank: int) -> dict[str, Any]:
    spreads = layout.spreads
    groups = [
        {
            "name": name,
            "num_groups": groups.num_blocks,
            "size": layout.group_size(name),
            "axes": layout.config.leaves_below(name),
            "nodes": dataclasses.asdict(spreads[name]) if spreads else None,
            "group_rank": groups.block_of(rank).index(rank),
            "ranks": groups.block_of(rank),
        }
        for name, groups in layout.plan.partitions.items()
    ]
    return {
        "world_size": layout.world_size,
        "ranks_per_node": layout.ranks_per_node,
        "num_nodes": layout.num_nodes,
        "tree": str(layout.config),
        "axes": layout.axes,
        "rank": rank,
        "groups": groups,
        "warnings": layout.warnings(),
    }


def _print(layout: Layout, rank: int) -> None:
    print(_draw_tree(layout.config))
    groups = layout.plan.partitions
    if groups:
        rows = [
            [name, each.num_blocks, layout.group_size(name), *_first_and_last(each)] for name, each in groups.items()
        ]
        print()
        print_table(["group", "groups", "size", "first", "second", "last"], rows)
    _print_nodes(layout)
    grid = _grid_table(layout.axes, layout.ranks_per_node)
    if grid is not None:
        print()
        print_table(*grid, title="The ranks:")
    if groups:
        own = {name: each.block_of(rank) for name, each in groups.items()}
        rows = [[name, ranks.index(rank), *_neighbours(ranks, rank), shorten(ranks)] for name, ranks in own.items()]
        print()
        print_table(["group", "index", "before", "behind", "ranks"], rows, title=f"Rank {rank} is in:")
    for warning in layout.warnings():
        print_text(f"\nwarning: {warning}")


def _neighbours(ranks: Sequence[int], rank: int) -> tuple[str, str]:
    """Return the ranks before and behind one; in brackets those that are so in a periodic field only."""
    index, last = ranks.index(rank), len(ranks) - 1
    before, behind = str(ranks[index - 1]), str(ranks[(index + 1) % len(ranks)])
    return before if index else f"({before})", behind if index < last else f"({behind})"


def _print_nodes(layout: Layout) -> None:
    spreads = layout.spreads
    if not spreads:
        return
    rest = layout.world_size % (layout.ranks_per_node or 1)
    fewer = f", the last one with {rest}" if rest else ""
    nodes = "one node" if layout.num_nodes == 1 else f"{layout.num_nodes} nodes of {layout.ranks_per_node} ranks{fewer}"
    print(f"\nOn {nodes}:")
    for name, spread in spreads.items():
        size = layout.group_size(name)
        what = f"{spread.num_groups} group{'s' * (spread.num_groups > 1)} of {size} rank{'s' * (size > 1)}"
        print_text(f"{name}: {what}, {where(spread, size)}")


def _draw_tree(config: ProcessGroupConfig) -> str:
    def branches(name: str, before: str, below: str) -> Iterator[tuple[str, int]]:
        yield before + name, config.get_node(name).size or 1
        children = config.children(name)
        for child in children[:-1]:
            yield from branches(child.name, f"{below}├── ", f"{below}│   ")
        for child in children[-1:]:
            yield from branches(child.name, f"{below}└── ", f"{below}    ")

    lines = list(branches(config.root.name, "", ""))
    width = max(len(label) for label, _ in lines)
    digits = max(len(str(size)) for _, size in lines)
    return "\n".join(f"{label:<{width}}  {size:>{digits}}" for label, size in lines)


def _first_and_last(partition: Partition) -> tuple[str, str, str]:
    """Return the ranks of the first group, the second and the last, as short texts; empty where there are fewer."""
    first, *second = (shorten(block) for block in itertools.islice(partition.blocks(), 2))
    last = shorten(partition.block_of(partition.world_size - 1)) if second else ""
    return first, second[0] if partition.num_blocks > 2 else "", last


def _grid_table(axes: dict[str, int], ranks_per_node: int | None) -> tuple[list[str], list[list[object]]] | None:
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
        rows.append([*place, *ranks, *([shorten(nodes)] if nodes else [])])
    return columns, rows
