"""Each rank gets a window of a sharded dim, or gives one back to be added up: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distman._job.groups.registry import Group
from distman.collectives import LinearFunction, exchange, layout_of, new_empty, still_carried
from distman.domain._windows import Run, Runs, Windows, gaps, plan

_IN_FLOAT32 = (torch.float16, torch.bfloat16)


class Fetch(LinearFunction):
    """This rank's window of a dim, of which the ranks whose shards it touches send their parts.

    What no shard has gets a value, which is not part of the linear map: the adjoint's adjoint has zeros there.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, windows: Windows, group: Group, value: float = 0.0
    ) -> torch.Tensor:
        ctx.arguments = dim, windows, group
        tensor = still_carried(tensor, group)
        incoming, outgoing, beyond = plan(windows, group.rank)
        result = _empty(tensor, dim, windows.length(group.rank))
        for start, end in beyond:
            result.narrow(dim, start, end - start).fill_(value)
        sends, receives = ([tensor.narrow(dim, 0, 0)] * group.size for _ in range(2))
        for rank, runs in outgoing.items():
            sends[rank] = _joined([_taken(tensor, dim, run) for run in runs], dim)
        for rank, runs in incoming.items():
            receives[rank] = _place(result, dim, runs[0]) if _is_plain(runs) else _empty(tensor, dim, _num_sent(runs))
        main, others = _own(incoming, group)
        sends[group.rank] = _taken(tensor, dim, main)  # copied while the others travel
        receives[group.rank] = _place(result, dim, main)
        exchange(sends, receives, group, f"windows {layout_of(tensor, dim)} dim {dim} {windows.text}")
        pieces = [(run, _taken(tensor, dim, run)) for run in others]
        for rank, runs in incoming.items():
            if rank != group.rank and not _is_plain(runs):
                pieces += _split(receives[rank], runs, dim)
        for run, piece in pieces:
            _place(result, dim, run).copy_(piece.flip(dim) if run.step < 0 else piece)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return Deposit.apply(grad, *ctx.arguments), None, None, None, None


class Deposit(LinearFunction):
    """This rank's shard of the sum of all windows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, windows: Windows, group: Group) -> torch.Tensor:
        ctx.arguments = dim, windows, group
        tensor = still_carried(tensor, group)
        incoming, outgoing, _ = plan(windows, group.rank)
        result = _empty(tensor, dim, windows.sizes[group.rank])
        sends, receives = ([tensor.narrow(dim, 0, 0)] * group.size for _ in range(2))
        for rank, runs in incoming.items():
            if rank != group.rank:
                sends[rank] = _joined([_folded(tensor, dim, run) for run in runs], dim)
        for rank, runs in outgoing.items():
            receives[rank] = _empty(tensor, dim, _num_sent(runs))
        main, others = _own(incoming, group)
        sends[group.rank] = _place(tensor, dim, main)  # copied while the others travel
        receives[group.rank] = _taken(result, dim, main)
        for start, end in gaps([(main.source, main.source + main.length)], windows.sizes[group.rank]):
            result.narrow(dim, start, end - start).zero_()
        exchange(sends, receives, group, f"sums of windows {layout_of(tensor, dim)} dim {dim} {windows.text}")
        total = result.float() if tensor.dtype in _IN_FLOAT32 else result
        pieces = [(run, _folded(tensor, dim, run)) for run in others]
        for rank in sorted(outgoing):  # the order in which parts are added up
            if rank != group.rank:
                pieces += _split(receives[rank], outgoing[rank], dim)
        for run, piece in pieces:
            _taken(total, dim, run).add_(piece)
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return Fetch.apply(grad, *ctx.arguments), None, None, None


def _own(incoming: Runs, group: Group) -> tuple[Run, list[Run]]:
    """Return the longest run that a rank's window has of its own shard as it is, maybe empty, and the others."""
    runs = sorted(incoming.get(group.rank, []), key=lambda run: -run.length if run.step == 1 else 0)
    if runs and runs[0].step == 1:
        return runs[0], runs[1:]
    return Run(0, 0, 0), runs


def _is_plain(runs: Sequence[Run]) -> bool:
    """Return whether what another rank sends can be received in its place."""
    return len(runs) == 1 and runs[0].step == 1


def _taken(shard: torch.Tensor, dim: int, run: Run) -> torch.Tensor:
    return shard.narrow(dim, run.source, run.num_sent)


def _place(window: torch.Tensor, dim: int, run: Run) -> torch.Tensor:
    return window.narrow(dim, run.target, run.length)


def _empty(like: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return new_empty(like, shape)


def _num_sent(runs: Sequence[Run]) -> int:
    return sum(run.num_sent for run in runs)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _split(message: torch.Tensor, runs: Sequence[Run], dim: int) -> list[tuple[Run, torch.Tensor]]:
    return list(zip(runs, message.split_with_sizes([run.num_sent for run in runs], dim), strict=True))


def _folded(window: torch.Tensor, dim: int, run: Run) -> torch.Tensor:
    """Return what a run of a window adds to the entries that it was made of, in their order."""
    part = _place(window, dim, run)
    if run.step == 0:
        return part.sum(dim, keepdim=True, dtype=part.dtype)
    return part.flip(dim) if run.step < 0 else part
