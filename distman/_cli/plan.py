"""``distman plan``: draw the groups or the mesh of a job of any size, without its processes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from distman._cli.output import print_table, print_text, shorten_ranks
from distman._cli.parser import add_number
from distman.topology import (
    READY_MADE,
    NotationError,
    Partition,
    Plan,
    ProcessGroupConfig,
    ProcessGroupNode,
    check_new_names,
    mesh_plan,
    parse_mesh,
    parse_tree,
    tree_plan,
)

_MAX_WORLD_SIZE = 10_000_000  # more ranks than any machine has; their groups still fit into memory
# Ranks and columns up to which a grid of all ranks is drawn: it has to fit on a screen of 80 columns.
_MAX_GRID_RANKS = 64
_MAX_GRID_COLUMNS = 16
_SHOWN_RUNS = 4  # runs of ranks in a line; a line of a terminal holds no more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distman plan --world-size RANKS\n                    (--tree TREE | --mesh MESH) [options]"
    parser.description = (
        "Draw the groups that create_groups_from_config() or initialize_mesh() would make; nothing is started. The "
        "exit code is 0, 1 where the plan does not fit the world, 2 where the arguments are wrong."
    )
    add_number(parser, "--world-size", least=1, required=True, metavar="RANKS", help="number of ranks")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--tree", help='such as "world(data=16, model(spatial=8, channel=8))"')
    wanted.add_argument("--mesh", help="such as data=-1,model=4; one length may be -1")
    add_number(
        parser, "--rank", least=0, default=0, metavar="RANK", help="show the groups that this rank is in (default 0)"
    )
    add_number(parser, "--ranks-per-node", least=1, help="tell which groups cross nodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, 1 where the plan does not fit, or 2 where an argument is wrong."""
    try:
        layout = _read(arguments)
    except ValueError as error:
        print(f"distman plan: {error}", file=sys.stderr)
        return 2 if isinstance(error, NotationError) else 1
    if arguments.json:
        print(json.dumps(_as_json(layout, arguments.rank)))
    else:
        _print(layout, arguments.rank)
    return 0


def _read(arguments: argparse.Namespace) -> _Layout:
    size, rank = arguments.world_size, arguments.rank
    if size > _MAX_WORLD_SIZE:
        arguments.parser.error(f"--world-size must be at most {_MAX_WORLD_SIZE}, got {size}. Lower it.")
    if rank >= size:
        arguments.parser.error(f"--rank must be below the world size {size}, got {rank}. Choose a rank of this world.")
    if arguments.tree is not None:
        config = parse_tree(arguments.tree)
        plan = tree_plan(config, arguments.world_size)
        check_new_names([config.root.name], READY_MADE)
        check_new_names(plan.partitions, (*READY_MADE, "world"))
        if not plan.partitions:
            config.root.size = arguments.world_size
        config.update_parent_sizes()
    else:
        axes = parse_mesh(arguments.mesh)
        plan = mesh_plan(tuple(axes.values()), tuple(axes), arguments.world_size)
        check_new_names(plan.partitions, (*READY_MADE, "world"))
        config = ProcessGroupConfig(ProcessGroupNode("world", arguments.world_size))
        for name, length in plan.axes.items():
            config.add_node(ProcessGroupNode(name, length), "world")
    return _Layout(arguments.world_size, config, plan, arguments.ranks_per_node)


def _as_json(layout: _Layout, rank: int) -> dict[str, Any]:
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
        "axes": layout.plan.axes,
        "rank": rank,
        "groups": groups,
        "warnings": layout.warnings(),
    }


def _print(layout: _Layout, rank: int) -> None:
    print(_draw_tree(layout.config))
    groups = layout.plan.partitions
    if groups:
        rows = [
            [name, each.num_blocks, layout.group_size(name), *_first_and_last(each)] for name, each in groups.items()
        ]
        print()
        print_table(["group", "groups", "size", "first", "second", "last"], rows)
    _print_nodes(layout)
    grid = _grid_table(layout.plan.axes, layout.ranks_per_node)
    if grid is not None:
        print()
        print_table(*grid, title="The ranks:")
    if groups:
        own = {name: each.block_of(rank) for name, each in groups.items()}
        rows = [[name, ranks.index(rank), *_neighbours(ranks, rank), _shorten(ranks)] for name, ranks in own.items()]
        print()
        print_table(["group", "index", "before", "behind", "ranks"], rows, title=f"Rank {rank} is in:")
    for warning in layout.warnings():
        print_text(f"\nwarning: {warning}")


def _neighbours(ranks: Sequence[int], rank: int) -> tuple[str, str]:
    """Return the ranks before and behind one; in brackets those that are so in a periodic field only."""
    index, last = ranks.index(rank), len(ranks) - 1
    before, behind = str(ranks[index - 1]), str(ranks[(index + 1) % len(ranks)])
    return before if index else f"({before})", behind if index < last else f"({behind})"


def _print_nodes(layout: _Layout) -> None:
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
        print_text(f"{name}: {what}, {_where(spread, size)}")


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
    first, *second = (_shorten(block) for block in itertools.islice(partition.blocks(), 2))
    last = _shorten(partition.block_of(partition.world_size - 1)) if second else ""
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
        rows.append([*place, *ranks, *([_shorten(nodes)] if nodes else [])])
    return columns, rows


@dataclasses.dataclass(frozen=True)
class _Spread:
    """Over how many nodes the groups of a name extend."""

    num_groups: int
    num_on_one_node: int
    min_nodes: int  # of a group that extends over fewest
    max_nodes: int  # of a group that extends over most


@dataclasses.dataclass(frozen=True)
class _Layout:
    world_size: int
    config: ProcessGroupConfig  # with the sizes of all nodes; the axes of a mesh are the leaves below "world"
    plan: Plan
    ranks_per_node: int | None  # None where it does not matter

    @property
    def num_nodes(self) -> int | None:
        return None if self.ranks_per_node is None else -(-self.world_size // self.ranks_per_node)

    def group_size(self, name: str) -> int:
        return self.world_size // self.plan.partitions[name].num_blocks

    @functools.cached_property
    def spreads(self) -> dict[str, _Spread]:
        """Over how many nodes the groups extend, by name; empty where that is not known."""
        found: dict[str, _Spread] = {}
        if (per_node := self.ranks_per_node) is None:
            return found
        for name, groups in self.plan.partitions.items():
            counts = Counter(len({rank // per_node for rank in block}) for block in groups.blocks())
            found[name] = _Spread(groups.num_blocks, counts[1], min(counts), max(counts))
        return found

    def warnings(self) -> list[str]:
        """Return what is wrong with the plan although it fits: an innermost axis that crosses nodes."""
        outer, per_node = {name: size for name, size in self.plan.axes.items() if size > 1}, self.ranks_per_node
        if per_node is None or len(outer) < 2:
            return []
        innermost, size = outer.popitem()
        if self.spreads[innermost].max_nodes == 1:
            return []
        fitting = [name for name, length in outer.items() if per_node % length == 0]
        if size < per_node:
            remedy = f"Start a multiple of {size} ranks on each node, or choose a length that divides {per_node}."
        elif fitting:
            remedy = f"Put {fitting[-1]!r} last, whose groups fit into a node."
        else:
            remedy = f"Choose a length that divides {per_node}, so that the axis with most messages stays within nodes."
        problem = f"the innermost axis {innermost!r} crosses nodes: its groups have {size} ranks, a node has {per_node}"
        return [f"{problem}. {remedy}"]


def _shorten(ranks: Sequence[int]) -> str:
    return shorten_ranks(ranks, most=_SHOWN_RUNS)


def _where(spread: _Spread, group_size: int) -> str:
    """Return a phrase that says whether groups stay on one node."""
    each = "each " if spread.num_groups > 1 else ""
    if spread.max_nodes == 1:
        return f"{each}within one node"
    nodes = "-".join(map(str, sorted({max(spread.min_nodes, 2), spread.max_nodes})))
    if spread.num_on_one_node:
        others = spread.num_groups - spread.num_on_one_node
        return f"{spread.num_on_one_node} within one node, {others} across {nodes} nodes"
    return f"{each}across {nodes} nodes" + (", one rank on each" if spread.min_nodes == group_size else "")
