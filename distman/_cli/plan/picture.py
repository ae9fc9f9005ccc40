"""A plan of groups as an image: the ranks on their nodes, once for each name of a group, coloured by group."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distman._cli.output import PICTURES, check_output
from distman._cli.plan.layout import shorten, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from distman._cli.plan.layout import Layout


_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE8866", "#999999")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart, and one more."""

_INK = "#222222"
_FADED = "#777777"
_WIDTH = 13.0
"""Inches that a row of panels may take."""
_BESIDE, _ABOVE = 1.9, 1.35
"""Inches beside and above the cells of a panel."""
# Cells that can still be told apart in that width; beyond these the picture leaves some out, and says so.
_MAX_COLUMNS, _MAX_ROWS = 128, 32
_MAX_NUMBERED = 128
"""Cells up to which each shows its rank."""
_MAX_RUN = 16
"""Ranks in a column where hosts are not given."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
"""A step of hue that never returns to the same colour."""


@dataclass(frozen=True)
class _Grid:
    """The ranks as cells: a node, or a run of ranks, is a column."""

    columns: Sequence[int | None]  # those that are shown; None is a gap
    rows: Sequence[int | None]  # likewise
    cells: dict[tuple[int, int], int]  # column and row in the picture -> rank
    size: float  # of a cell, in inches


def draw_picture(layout: Layout, path: str | os.PathLike[str], *, rank: int = 0) -> None:
    """Draw the groups of a layout into a file.

    Each name of a group has a panel, in which a cell is a rank and a column is a node; where the number of ranks on a
    node is not known, a column is a run of ranks, along the innermost axis if that is short. The groups of ``rank`` are
    outlined.
    """
    check_output(Path(path), PICTURES)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = list(layout.plan.partitions)
    if not names:
        raise ValueError("the plan must have groups to be drawn, got only the world. Add a child to the tree.")
    per_column = _per_column(layout)
    grid = _grid(layout.world_size, per_column, rank)
    width = max(grid.size * len(grid.columns) + _BESIDE, 3.8)
    num_across = min(len(names), max(1, int(_WIDTH / width)))
    num_down = -(-len(names) // num_across)
    num_across = -(-len(names) // num_down)
    height = num_down * (grid.size * len(grid.rows) + _ABOVE) + 0.5
    figure = Figure(figsize=(num_across * width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    panels = list(figure.subplots(num_down, num_across, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        _draw_panel(panel, layout, name, grid, rank)
        _label(panel, grid, per_column, is_on_nodes=layout.ranks_per_node is not None)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    nodes = f" on {layout.num_nodes:,} nodes" if layout.num_nodes else ""
    title = f"{layout.config}\n{layout.world_size:,} ranks{nodes}, outlined are the groups of rank {rank}"
    figure.suptitle(title, color=_INK, fontsize=11, linespacing=1.5, parse_math=False)
    figure.savefig(path, dpi=150)


def _per_column(layout: Layout) -> int:
    """Return the ranks on a node, or else the innermost axis, unless it is too short or too long for a column."""
    lengths = [length for length in layout.axes.values() if length > 1]
    run = lengths[-1] if lengths and lengths[-1] <= _MAX_RUN else _MAX_RUN
    return min(layout.ranks_per_node or run, layout.world_size)


def _grid(world_size: int, per_column: int, rank: int) -> _Grid:
    """Return the grid of a world; where it is large, its ends and what surrounds a rank."""
    columns = _abbreviate(-(-world_size // per_column), rank // per_column, _MAX_COLUMNS)
    rows = _abbreviate(per_column, rank % per_column, _MAX_ROWS)
    cells = {
        (x, y): column * per_column + row
        for x, column in enumerate(columns)
        for y, row in enumerate(rows)
        if column is not None and row is not None and column * per_column + row < world_size
    }
    return _Grid(columns, rows, cells, min(0.5, max(0.085, (_WIDTH - _BESIDE) / len(columns))))


def _abbreviate(length: int, index: int, limit: int) -> list[int | None]:
    """Return the indices up to a length; of many the first, some around one, and the last, with None for a gap."""
    if length <= limit:
        return list(range(length))
    around = limit // 16
    wanted = {*range(limit // 4), *range(index - around, index + around + 1), *range(length - around, length)}
    shown: list[int | None] = []
    for one in sorted(wanted & {*range(length)}):
        if shown and shown[-1] != one - 1:
            shown.append(None)
        shown.append(one)
    return shown


def _draw_panel(axes: Axes, layout: Layout, name: str, grid: _Grid, rank: int) -> None:
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch, Rectangle

    partition = layout.plan.partitions[name]
    shown = {*grid.cells.values()}
    group_of = {one: index for index, block in enumerate(partition.blocks()) for one in block if one in shown}
    colours = _colours(partition.num_blocks)
    squares = [Rectangle((x - 0.5, y - 0.5), 1, 1) for x, y in grid.cells]
    faces = [colours[group_of[one]] for one in grid.cells.values()]
    edge = min(1.5, 4 * grid.size)
    axes.add_collection(PatchCollection(squares, facecolors=faces, edgecolors="white", linewidths=edge))
    if len(grid.cells) <= _MAX_NUMBERED:
        font = min(10.0, 72 * grid.size / (0.75 * max(len(str(max(shown))), 2)))
        for ((x, y), one), face in zip(grid.cells.items(), faces, strict=True):
            red, green, blue = to_rgb(face)
            ink = _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.6 else "white"
            axes.text(x, y, str(one), ha="center", va="center", fontsize=font, color=ink)
    members = {*partition.block_of(rank)}
    own = {place for place, one in grid.cells.items() if one in members}
    lines = [  # around the cells, not between them
        [(x + (dx + sign * dy) / 2, y + (dy + sign * dx) / 2) for sign in (-1, 1)]
        for x, y in own
        for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1))
        if (x + dx, y + dy) not in own
    ]
    width = min(2.5, 12 * grid.size)
    axes.add_collection(LineCollection(lines, colors=_INK, linewidths=width, capstyle="projecting", zorder=3))
    size = layout.group_size(name)
    nodes = [where(layout.spreads[name], size)] if layout.spreads else []
    title = [f"{name}: {partition.num_blocks:,} group{'s' * (partition.num_blocks > 1)} of {size:,}", *nodes]
    title.append(f"outlined: {shorten(partition.block_of(rank))}")
    axes.set_title("\n".join(title), loc="left", fontsize=9, color=_INK, linespacing=1.4, parse_math=False)
    if partition.num_blocks <= len(_COLOURS):
        pairs = zip(colours, partition.blocks(), strict=False)
        handles = [Patch(color=colour, label=shorten(block)) for colour, block in pairs]
        look = {"frameon": False, "fontsize": 8, "labelcolor": _INK, "handlelength": 1, "handleheight": 1}
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), **look)


def _colours(num_groups: int) -> Sequence[str | tuple[float, float, float]]:
    """Return a colour for each group; many have light ones, such that neighbours differ."""
    if num_groups <= len(_COLOURS):
        return _COLOURS
    lightness = (0.62, 0.72, 0.82)
    return [colorsys.hls_to_rgb(index * _GOLDEN_RATIO % 1, lightness[index % 3], 0.55) for index in range(num_groups)]


def _label(axes: Axes, grid: _Grid, per_column: int, *, is_on_nodes: bool) -> None:
    axes.set_xlim(-0.6, len(grid.columns) - 0.4)
    axes.set_ylim(len(grid.rows) - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=_FADED)
    axes.set_xticks(*_ticks(grid.columns, 1 if is_on_nodes else per_column, round(0.34 / grid.size + 0.5)))
    axes.set_yticks(*_ticks(grid.rows, 1, round(0.14 / grid.size + 0.5)))
    axes.set_xlabel("node" if is_on_nodes else "first rank of the column", fontsize=8, color=_FADED)
    axes.set_ylabel("rank on the node" if is_on_nodes else "rank in the column", fontsize=8, color=_FADED)


def _ticks(shown: Sequence[int | None], factor: int, distance: int) -> tuple[list[int], list[str]]:
    """Return places with their labels, as many as have room: the gaps, and what is far enough from these."""
    gaps = [place for place, index in enumerate(shown) if index is None]
    places = [place for place in range(0, len(shown), distance) if all(abs(place - gap) >= distance for gap in gaps)]
    places = sorted({*gaps, *places})
    return places, ["..." if index is None else str(index * factor) for index in (shown[place] for place in places)]
