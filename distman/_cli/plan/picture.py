"""A plan of groups as an image: the ranks on their nodes, once for each name of a group, coloured by group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from distman._cli.output import PICTURES, check_output
from distman._cli.plan.layout import shorten, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from distman._cli.plan.layout import Layout

_COLOURS, _NUM_COLOURS = "tab10", 10
_FADED = 0.35  # opacity of other groups than those of the rank
_MAX_WIDTH, _MAX_HEIGHT = 6.0, 4.0  # of the cells of a panel, in inches
_MAX_CELL = 0.5  # inches
_BESIDE, _ABOVE = 1.0, 1.2  # inches beside and above the cells of a panel
_MAX_NUMBERED = 128  # cells up to which each shows its rank
_MAX_RUN = 16  # ranks in a column where nodes are not given


def draw_picture(layout: Layout, path: str | os.PathLike[str], *, rank: int = 0) -> None:
    """Draw the groups of a layout into a file.

    Each name of a group has a panel, in which a cell is a rank and a column is a node; where the number of ranks on a
    node is not known, a column is a run of ranks, along the innermost axis if that is short. The groups of ``rank``
    have stronger colours.
    """
    check_output(Path(path), PICTURES)
    from matplotlib.figure import Figure

    names = list(layout.plan.partitions)
    if not names:
        raise ValueError("the plan must have groups to be drawn, got only the world. Add a child to the tree.")
    per_column = _per_column(layout)
    width = min(_MAX_WIDTH, _MAX_CELL * -(-layout.world_size // per_column))
    height = min(_MAX_HEIGHT, _MAX_CELL * per_column)
    num_across = min(2, len(names))
    num_down = -(-len(names) // num_across)
    size = (num_across * (max(width, 2.5) + _BESIDE), num_down * (height + _ABOVE) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(num_down, num_across, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        _draw_panel(panel, layout, name, per_column, rank)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    nodes = f" on {layout.num_nodes:,} nodes" if layout.num_nodes else ""
    title = f"{layout.config}\n{layout.world_size:,} ranks{nodes}; in strong colours the groups of rank {rank}"
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.savefig(path, dpi=150)


def _per_column(layout: Layout) -> int:
    """Return the ranks on a node, or else the innermost axis, unless it is too short or too long for a column."""
    lengths = [length for length in layout.axes.values() if length > 1]
    run = lengths[-1] if lengths and lengths[-1] <= _MAX_RUN else _MAX_RUN
    return min(layout.ranks_per_node or run, layout.world_size)


def _draw_panel(axes: Axes, layout: Layout, name: str, per_column: int, rank: int) -> None:
    import numpy as np

    partition, size = layout.plan.partitions[name], layout.group_size(name)
    num_columns = -(-layout.world_size // per_column)
    colours = np.full(num_columns * per_column, np.nan)  # the last node may have fewer ranks
    for index, block in enumerate(partition.blocks()):
        colours[list(block)] = index % _NUM_COLOURS
    strengths = np.full_like(colours, _FADED)
    own = partition.block_of(rank)
    strengths[list(own)] = 1.0
    cells, alpha = (values.reshape(num_columns, per_column).T for values in (colours, strengths))
    axes.imshow(cells, cmap=_COLOURS, vmin=0, vmax=_NUM_COLOURS, alpha=alpha, aspect="auto", interpolation="none")
    if layout.world_size <= _MAX_NUMBERED:
        for one in range(layout.world_size):
            weight = "bold" if one in own else "normal"
            axes.text(*divmod(one, per_column), str(one), ha="center", va="center", fontsize=9, weight=weight)
        axes.set_xticks(np.arange(0.5, num_columns - 1), minor=True)
        axes.set_yticks(np.arange(0.5, per_column - 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=2)
    places = [where(layout.spreads[name], size)] if layout.spreads else []
    title = [f"{name}: {partition.num_blocks:,} group{'s' * (partition.num_blocks > 1)} of {size:,}", *places]
    title.append(f"its group: {shorten(own)}")
    axes.set_title("\n".join(title), loc="left", fontsize=9, parse_math=False)
    axes.tick_params(length=0, which="both", labelsize=8)
    axes.locator_params(integer=True)
    is_on_nodes = layout.ranks_per_node is not None
    axes.set_xlabel("node" if is_on_nodes else f"run of {per_column} ranks", fontsize=8)
    axes.set_ylabel("rank on the node" if is_on_nodes else "rank in the run", fontsize=8)
