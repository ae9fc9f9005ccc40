"""Pictures of a training's history."""

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
    """Draw values of the history over the epochs into a file.

    Collective. Rank 0 draws; the file name's ending says the format.

    Args:
        history: The history.
        names: Names of the values to draw, one line each.
        path: The file; its folder is made if there is none.
        title: What stands above.
        log: Draw the values on a logarithmic axis.

    Raises:
        RankFailedError: On every rank: drawing failed. The cause on rank 0 is ImportError without matplotlib,
            ValueError without such values, OSError if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("matplotlib must be installed to draw plots. Run pip install matplotlib.") from error
    unknown = [name for name in names if name not in history.names]
    if unknown or not names:
        raise ValueError(f"names must be of the history, got {unknown or 'none'}. It has {history.names}.")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        _draw(axes, history, name)
    axes.set(xlabel="epoch", title=title, yscale="log" if log else "linear")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, history: History, name: str) -> None:
    points = [
        (epoch + 1, value) for epoch, value in zip(history["epoch"], history[name], strict=True) if value == value
    ]
    axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else None, markersize=3, label=name)
