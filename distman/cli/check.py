"""``distman check``: start the job that a launcher started, show its ranks, and prove that they can talk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman.cli.output import plain_table
from distman.errors import DistmanError

if TYPE_CHECKING:
    from distman.manager import DistributedManager
    from distman.rendezvous.peers import Peer

__all__ = ["add_parser", "run"]

_COLUMNS = ("rank", "host", "pid", "node", "local rank", "device", "launcher", "torch", "distman")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser.

    Local.
    """
    parser = subparsers.add_parser(
        "check",
        help="start the job under any launcher, show its ranks, and check one collective",
        description="Run it as you run your script, for example: srun -N2 -n4 python -m distman check",
    )
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument("--timeout", type=float, help="seconds to wait for all ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; rank 0 prints.

    Collective.

    Returns:
        The exit code: 0 where all ranks came and the sum was exact on each, else 1.
    """
    from distman.manager import DistributedManager

    try:
        manager = DistributedManager.initialize(method=arguments.method, rendezvous_timeout=arguments.timeout)
    except (DistmanError, ValueError) as error:
        print(f"distman check: {error}", file=sys.stderr)
        return 1
    wrong = _wrong_ranks(manager)
    if manager.is_main:
        print(_as_json(manager, wrong) if arguments.json else _as_text(manager, wrong), flush=True)
    manager.cleanup()
    return 1 if wrong else 0


def _wrong_ranks(manager: DistributedManager) -> list[int]:
    """Return the ranks on which a sum over all ranks was not exact."""
    import torch
    import torch.distributed as dist

    if not manager.distributed:
        return []
    size = manager.world_size
    summands = torch.arange(1000, dtype=torch.int64, device=manager.device) * size + manager.rank
    dist.all_reduce(summands)
    ranks_sum = size * (size - 1) // 2
    expected = torch.arange(1000, dtype=torch.int64, device=manager.device) * size * size + ranks_sum
    is_wrong = torch.zeros(size, dtype=torch.int64, device=manager.device)
    is_wrong[manager.rank] = int(not torch.equal(summands, expected))
    dist.all_reduce(is_wrong)
    return [int(rank) for rank in is_wrong.nonzero()]


def _as_json(manager: DistributedManager, wrong: Sequence[int]) -> str:
    return json.dumps(
        {
            "world_size": manager.world_size,
            "backend": manager.backend,
            "initialization_method": manager.initialization_method,
            "ranks": [dataclasses.asdict(peer) for peer in manager.roll_call],
            "wrong_ranks": list(wrong),
        }
    )


def _as_text(manager: DistributedManager, wrong: Sequence[int]) -> str:
    table = plain_table(_COLUMNS, [_row(peer) for peer in manager.roll_call])
    return "\n".join([table, "", _conclusion(manager, wrong)])


def _row(peer: Peer) -> tuple[str, ...]:
    place = (peer.rank, peer.host, peer.pid, peer.node_rank, peer.local_rank)
    return (*map(str, place), peer.device, peer.launcher, peer.torch, peer.distman)


def _conclusion(manager: DistributedManager, wrong: Sequence[int]) -> str:
    if not manager.distributed:
        return "One process: no other rank to talk to. Start it with torchrun, mpirun or srun to check a job."
    what = f"all_reduce over {manager.world_size} ranks on {manager.num_nodes} nodes ({manager.backend})"
    return f"{what}: WRONG on ranks {', '.join(map(str, wrong))}" if wrong else f"{what}: exact"
