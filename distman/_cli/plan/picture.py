"""A plan of groups as an image: the ranks on their nodes, once for each name of a group, coloured by group."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distman._cli.output import PICTURES, check_output
from distman._cli.plan.drawing import shorten_ranks, where
from distman.topology import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
"""A step of hue that never comes back to the same colour."""


@dataclass(frozen=True)
class _Grid:
    """The ranks as cells: a node, or a run of ranks, is a column."""

    per_column: int
    columns: list[int | None]  # those that are shown; None is a gap
    rows: list[int | None]  # likewise
    world_size: int

    @classmethod
    def of(cls, world_size: int, per_column: int, rank: int) -> _Grid:
        """Return the grid of a world; where it is large, its ends and what surrounds a rank."""
        per_column = min(per_column, world_size)
        column, row = divmod(rank, per_column)
        columns = _abbreviate(-(-world_size // per_column), column, _MAX_COLUMNS)
        return cls(per_column, columns, _abbreviate(per_column, row, _MAX_ROWS), world_size)

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """Yield the column and the row of the picture, and the rank, of every cell that is shown."""
        for x, column in enumerate(self.columns):
            for y, row in enumerate(self.rows):
                if column is not None and row is not None and column * self.per_column + row < self.world_size:
                    yield x, y, column * self.per_column + row


def _abbreviate(length: int, index: int, limit: int) -> list[int | None]:
    """Return the indices up to a length; of many the first, some around one, and the last, with None for a gap."""
    if length <= limit:
        return list(range(length))
    around, last = limit // 16, limit // 16
    wanted = {*range(limit // 4), *range(index - around, index + around + 1), *range(length - last, length)}
    shown: list[int | None] = []
    for one in sorted(wanted & {*range(length)}):
        if shown and shown[-1] != one - 1:
            shown.append(None)
        shown.append(one)
    return shown


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
    grid = _Grid.of(layout.world_size, layout.ranks_per_node or _run_length(layout), rank)
    cell = min(0.5, max(0.085, (_WIDTH - _BESIDE) / len(grid.columns)))
    width = max(cell * len(grid.columns) + _BESIDE, 3.8)
    num_across = min(len(names), max(1, int(_WIDTH / width)))
    num_down = -(-len(names) // num_across)
    num_across = -(-len(names) // num_down)
    height = num_down * (cell * len(grid.rows) + _ABOVE) + 0.5
    figure = Figure(figsize=(num_across * width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    panels = list(figure.subplots(num_down, num_across, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        _draw_panel(panel, layout, name, grid, cell, rank)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    _add_title(figure, layout, rank)
    figure.savefig(path, dpi=150)


def _run_length(layout: Layout) -> int:
    """Return the length of the innermost axis, unless it is too short or too long for a column."""
    lengths = [length for length in layout.axes.values() if length > 1]
    return lengths[-1] if lengths and lengths[-1] <= _MAX_RUN else _MAX_RUN


def _add_title(figure: Figure, layout: Layout, rank: int) -> None:
    nodes = f" on {layout.num_nodes:,} nodes" if layout.num_nodes else ""
    figure.suptitle(
        f"{layout.config}\n{layout.world_size:,} ranks{nodes}, outlined are the groups of rank {rank}",
        color=_INK,
        fontsize=11,
        linespacing=1.5,
        parse_math=False,
    )


def _draw_panel(axes: Axes, layout: Layout, name: str, grid: _Grid, cell: float, rank: int) -> None:
    partition = layout.plan.partitions[name]
    cells = list(grid.cells())
    group_of = _group_of(partition, {shown for _, _, shown in cells})
    colours = _colours(partition.num_blocks)
    _fill(axes, [(x, y, colours[group_of[shown]]) for x, y, shown in cells], cell)
    if len(cells) <= _MAX_NUMBERED:
        _number(axes, [(x, y, shown, colours[group_of[shown]]) for x, y, shown in cells], cell)
    members = set(partition.block_of(rank))
    _outline(axes, {(x, y) for x, y, shown in cells if shown in members}, min(2.5, 12 * cell))
    _frame(axes, layout, grid, cell)
    axes.set_title(_title(layout, name, rank), loc="left", fontsize=9, color=_INK, linespacing=1.4, parse_math=False)
    if partition.num_blocks <= len(_COLOURS):
        _add_legend(axes, partition, colours)


def _group_of(partition: Partition, shown: set[int]) -> dict[int, int]:
    return {rank: index for index, block in enumerate(partition.blocks()) for rank in block if rank in shown}


def _colours(num_groups: int) -> Sequence[str]:
    """Return a colour for each group; many have light ones, such that neighbours differ."""
    if num_groups <= len(_COLOURS):
        return _COLOURS
    from matplotlib.colors import to_hex

    return [
        to_hex(colorsys.hls_to_rgb(index * _GOLDEN_RATIO % 1, (0.62, 0.72, 0.82)[index % 3], 0.55))
        for index in range(num_groups)
    ]


def _fill(axes: Axes, cells: Sequence[tuple[int, int, str]], cell: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    squares = [Rectangle((x - 0.5, y - 0.5), 1, 1) for x, y, _ in cells]
    colours = [colour for _, _, colour in cells]
    axes.add_collection(PatchCollection(squares, facecolors=colours, edgecolors="white", linewidths=min(1.5, 4 * cell)))


def _number(axes: Axes, cells: Sequence[tuple[int, int, int, str]], cell: float) -> None:
    from matplotlib.colors import to_rgb

    digits = max(len(str(rank)) for _, _, rank, _ in cells)
    size = min(10.0, 72 * cell / (0.75 * max(digits, 2)))
    for x, y, rank, colour in cells:
        red, green, blue = to_rgb(colour)
        is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.6
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=size, color=_INK if is_bright else "white")


def _outline(axes: Axes, cells: set[tuple[int, int]], width: float) -> None:
    """Draw a line around cells, not between them."""
    from matplotlib.collections import LineCollection

    lines = []
    for x, y in cells:
        for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            if (x + dx, y + dy) not in cells:
                middle = (x + dx / 2, y + dy / 2)
                lines.append([(middle[0] + sign * dy / 2, middle[1] + sign * dx / 2) for sign in (-1, 1)])
    axes.add_collection(LineCollection(lines, colors=_INK, linewidths=width, capstyle="projecting", zorder=3))


def _frame(axes: Axes, layout: Layout, grid: _Grid, cell: float) -> None:
    axes.set_xlim(-0.6, len(grid.columns) - 0.4)
    axes.set_ylim(len(grid.rows) - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=_FADED)
    factor = 1 if layout.ranks_per_node else grid.per_column
    axes.set_xticks(*_ticks(grid.columns, factor, round(0.34 / cell + 0.5)))
    axes.set_yticks(*_ticks(grid.rows, 1, round(0.14 / cell + 0.5)))
    axes.set_xlabel("node" if layout.ranks_per_node else "first rank of the column", fontsize=8, color=_FADED)
    axes.set_ylabel("rank on the node" if layout.ranks_per_node else "rank in the column", fontsize=8, color=_FADED)


def _ticks(shown: Sequence[int | None], factor: int, distance: int) -> tuple[list[int], list[str]]:
    """Return some places with their labels: the first, the last, the gaps, and some between, with room for each."""
    step = next(step for step in (1, 2, 4, 8, 16) if step >= min(distance, 16))
    ends = {0, len(shown) - 1, *(place for place, index in enumerate(shown) if index is None)}
    between = [
        place
        for place, index in enumerate(shown)
        if index is not None and index % step == 0 and all(abs(place - end) >= step for end in ends)
    ]
    places = sorted({*ends, *between})
    return places, ["..." if index is None else str(index * factor) for index in (shown[place] for place in places)]


def _title(layout: Layout, name: str, rank: int) -> str:
    partition, size = layout.plan.partitions[name], layout.group_size(name)
    lines = [f"{name}: {partition.num_blocks:,} group{'s' * (partition.num_blocks > 1)} of {size:,}"]
    if layout.spreads:
        lines.append(where(layout.spreads[name], size))
    return "\n".join([*lines, f"outlined: {shorten_ranks(partition.block_of(rank))}"])


def _add_legend(axes: Axes, partition: Partition, colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colour, label=shorten_ranks(block))
        for colour, block in zip(colours, partition.blocks(), strict=False)
    ]
    axes.legend(
        handles=patches,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
        handlelength=1,
        handleheight=1,
    )
