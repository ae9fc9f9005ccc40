"""Plots of a training's history."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distman.decorators import on_rank
from distman.handler._history import History


@on_rank(0)
def plot_history(
    history: History, names: Sequence[str], path: str | os.PathLike[str], *, title: str = "", log: bool = False
) -> None:
    """Plot values of the history over the epochs into a file, on rank 0. Collective."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed. Run pip install matplotlib.") from error
    unknown = [name for name in names if name not in history.names]
    if unknown or not names:
        raise ValueError(f"names must be in the history, got {unknown or 'none'}. The history has {history.names}.")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # inches, of matplotlib's usual width
    axes = figure.add_subplot()
    for name in names:
        _draw(axes, history, name)
    axes.set(xlabel="epoch", title=title, yscale="log" if log else "linear")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)  # 960 pixels wide: sharp on a page and on a slide


def _draw(axes: Any, history: History, name: str) -> None:
    points = [
        (epoch + 1, value) for epoch, value in zip(history["epoch"], history[name], strict=True) if value == value
    ]
    marker = "o" if len(points) < 20 else None  # so few that single points, or one alone, would be hard to see
    axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=name)
