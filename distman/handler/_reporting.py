"""Log lines, progress bars and plots of a training, on rank 0."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from distman._base.arguments import check_choice, require
from distman.decorators import on_rank
from distman.handler._accumulators import Accumulators
from distman.handler._history import History
from distman.manager import DistributedManager
from distman.training import as_text, training_logger

LoggerMode = Literal["console", "file", "both"]


class Reporter:
    """Logs one line for each epoch, on rank 0."""

    def __init__(self, mode: LoggerMode | None = None, file: str | Path = "training.log") -> None:
        check_choice("logger_mode", mode, (*get_args(LoggerMode), None))
        self._is_silent = not DistributedManager().is_main
        if mode is None or self._is_silent:
            return
        for earlier in [one for one in training_logger.handlers if getattr(one, "is_reporters", False)]:
            training_logger.removeHandler(earlier)
            earlier.close()
        handlers: dict[str, logging.Handler] = {}
        if mode in ("console", "both"):
            handlers["%(message)s"] = logging.StreamHandler(sys.stdout)
        if mode in ("file", "both"):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            handlers["%(asctime)s %(message)s"] = logging.FileHandler(file, encoding="utf-8")
        for form, handler in handlers.items():
            handler.setFormatter(logging.Formatter(form))
            handler.is_reporters = True  # type: ignore[attr-defined]  # so that the next reporter finds and replaces it
            training_logger.addHandler(handler)
        training_logger.setLevel(logging.INFO)
        training_logger.propagate = False

    def log(self, text: str, *args: object) -> None:
        if not self._is_silent:
            training_logger.info(text, *args)

    def log_record(self, record: Mapping[str, float], num_epochs: int | None) -> None:
        hidden = {"epoch", "step"} | (set() if record.get("skipped") else {"skipped"})
        is_epoch = "skipped" in record
        place = f"epoch {_of(record['epoch'], num_epochs)}" if is_epoch else f"step {int(record['step'])}"
        self.log("%s: %s", place, as_text({name: value for name, value in record.items() if name not in hidden}))


class ProgressBar:
    """A bar with the number of batches, their rate and this rank's mean loss, on rank 0."""

    def __init__(self, epoch: int, num_epochs: int | None, total: int | None, *, is_shown: bool | None) -> None:
        if is_shown is None:
            is_watched = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")  # or in a notebook
            is_shown = is_watched and find_spec("tqdm") is not None
        self._bar: Any = None
        if is_shown and DistributedManager().is_main:
            tqdm = require("tqdm.auto", "progress=True").tqdm
            self._bar = tqdm(total=total, desc=f"epoch {_of(epoch, num_epochs)}", unit="batch", leave=False)

    def advance(self, num_batches: int, accumulators: Accumulators) -> None:
        if self._bar is not None and self._bar.update(num_batches):
            totals, nums = accumulators.sums[:, :1].tolist()
            means = [f"{total / num:.4g}" if num else "nan" for total, num in zip(totals, nums, strict=True)]
            self._bar.set_postfix(dict(zip(accumulators.names, means, strict=False)), refresh=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _of(epoch: float, num_epochs: int | None) -> str:
    return f"{int(epoch) + 1}" if num_epochs is None else f"{int(epoch) + 1}/{num_epochs}"


@on_rank(0)
def plot_history(
    history: History, names: Sequence[str], path: str | os.PathLike[str], *, title: str = "", log: bool = False
) -> None:
    """Plot values of the history over the epochs into a file, on rank 0. Collective."""
    require("matplotlib", "a plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    unknown = [name for name in names if name not in history.names]
    if unknown or not names:
        raise ValueError(f"names must be in the history, got {unknown or 'none'}. The history has {history.names}.")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # inches, of matplotlib's usual width
    axes = figure.add_subplot()
    for name in names:
        points = [pair for pair in zip(history["epoch"], history[name], strict=True) if not math.isnan(pair[1])]
        marker = "o" if len(points) < 20 else None  # so few that single points, or one alone, would be hard to see
        axes.plot(
            [epoch + 1 for epoch, _ in points], [one for _, one in points], marker=marker, markersize=3, label=name
        )
    axes.set(xlabel="epoch", title=title, yscale="log" if log else "linear")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)  # 960 pixels wide: sharp on a page and on a slide
