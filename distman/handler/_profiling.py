"""A profile of some steps of a training, with all ranks in one picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distman._base.arguments import check_number
from distman._base.log import logger
from distman._base.text import printable
from distman.handler._events import Callback
from distman.manager import DistributedManager

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler

_MOST_ROWS = 1000  # rows of a rank: its processes, GPUs, and what the profiler adds


class Profiler(Callback):
    """Profiles some steps with ``torch.profiler`` on every rank, and merges what they did into one trace.

    The file ``trace.json``, which https://ui.perfetto.dev and Chrome show, has the ranks one below the other, on one
    axis of time, as far as the clocks of their hosts agree; ``rank-0.json`` and its like have one each. Ranks whose
    files rank 0 does not see are left out. A file that cannot be written is a warning, and the training goes on. Add it
    on all ranks.

    Args:
        folder: The folder for the traces, the same on all ranks. It is made.
        wait: Number of steps to leave out first, in which a training finds its pace.
        active: Number of steps to profile.
        options: Arguments of :class:`torch.profiler.profile`, such as ``profile_memory=True``.

    Raises:
        ValueError: A number is too small.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(Profiler("profile", wait=100, active=5))
    """

    def __init__(self, folder: str | os.PathLike[str], *, wait: int = 10, active: int = 3, **options: Any) -> None:
        check_number("wait", wait, least=0)
        check_number("active", active)
        self._folder, self._wait, self._active, self._options = Path(folder), wait, active, options
        self._profile: torch.profiler.profile | None = None
        self._num_steps = 0

    def on_train_begin(self, handler: NNHandler) -> None:
        self._num_steps = 0
        self._begin_if_due()

    def on_step_end(self, handler: NNHandler, step: int) -> None:
        self._num_steps += 1
        if self._profile is not None:
            self._profile.step()
        if self._num_steps == self._wait + self._active:
            self._end()
        self._begin_if_due()

    def on_train_end(self, handler: NNHandler) -> None:
        self._end()

    def on_exception(self, handler: NNHandler, error: BaseException) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _begin_if_due(self) -> None:
        if self._num_steps == self._wait:
            self._profile = torch.profiler.profile(**self._options)
            self._profile.start()

    def _end(self) -> None:
        """Write the traces, and merge them on rank 0."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        manager = DistributedManager()
        _or_warn(lambda: self._export(profile, manager.rank))
        manager.barrier("the traces of all ranks")
        if manager.is_main:
            _or_warn(lambda: self._merge(manager.world_size))

    def _export(self, profile: torch.profiler.profile, rank: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(os.fspath(self._path(rank)))

    def _merge(self, world_size: int) -> None:
        paths = {rank: self._path(rank) for rank in range(world_size)}
        traces = {rank: json.loads(path.read_bytes()) for rank, path in paths.items() if path.exists()}
        (self._folder / "trace.json").write_text(json.dumps(merged(traces)))

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"


def merged(traces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    bases = {rank: trace.get("baseTimeNanoseconds", 0) for rank, trace in traces.items()}
    base = min(bases.values(), default=0)
    events = [
        event
        for rank, trace in traces.items()
        for event in _of_rank(rank, trace["traceEvents"], (bases[rank] - base) / 1000)
    ]
    return {"baseTimeNanoseconds": base, "displayTimeUnit": "ms", "traceEvents": events}


def _of_rank(rank: int, events: list[dict[str, Any]], later: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank in rows of its own, so many microseconds later."""
    rows: dict[Any, int] = {}
    for event in events:
        row = rows.setdefault(event.get("pid"), rank * _MOST_ROWS + len(rows))
        changed = {"pid": row} | ({"ts": event["ts"] + later} if "ts" in event else {})
        if "id" in event:  # of arrows, which begin and end on one rank
            changed["id"] = f"{rank}.{event['id']}"
        if event["name"] == "process_name":
            changed["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
        if event["name"] == "process_sort_index":
            changed["args"] = {"sort_index": row}
        yield event | changed


def _or_warn(write: Callable[[], None]) -> None:
    try:
        write()
    except (OSError, RuntimeError, ValueError) as error:  # of a full disk, torch, and a file that is not whole
        reason = printable(f"{type(error).__name__}: {error}")
        logger.warning("the profile could not be written: %s. The training goes on", reason)
