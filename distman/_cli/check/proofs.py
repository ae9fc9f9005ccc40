"""Every collective on the job's own backend and device, compared with what arithmetic says.

A proof is a function of the manager that returns whether this rank got exactly what it should. Rank r's shard has
(r + 1) % 3 rows, so that of three ranks or more some are empty. The collectives of torch carry a small message, and one
of 4 MiB, which takes another way through network and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from distman import collectives
from distman._base import timing
from distman._cli.timing import pass_on
from distman._coordination import protocol
from distman._coordination.wait_scope import collective
from distman._torch_internals import all_gather_single, is_lost_connection
from distman.errors import DistmanError, RankFailedError
from distman.manager import DistributedManager
from distman.topology import split_sizes

Proof = Callable[[DistributedManager], bool]
_WIDTH = 1000  # elements of a row: not a power of two, which could hide a wrong stride
_FEW, _MANY = torch.arange(1000), torch.arange((4 << 20) // 8)


@collective
def prove(name: str, proof: Proof, manager: DistributedManager) -> bool:
    """Return whether a collective is exact here. Collective.

    Raises:
        DistmanError: The collective failed on this rank.
        RuntimeError: A connection broke, because of another rank.
    """
    try:
        return proof(manager)
    except RankFailedError:
        raise
    except Exception as error:  # a backend may raise anything: it is raised on, with the collective's name
        if is_lost_connection(error):  # the cause is elsewhere, and is found by the caller
            raise
        raise DistmanError(
            f"{name} failed on rank {manager.rank}: {type(error).__name__}: {error}. See the traceback there."
        ) from error


def _sizes(manager: DistributedManager) -> list[int]:
    return [(rank + 1) % 3 for rank in range(manager.world_size)]


def _shard(rank: int, manager: DistributedManager) -> torch.Tensor:
    return _rows([1000 * rank + row for row in range((rank + 1) % 3)], manager)


def _rows(values: list[int], manager: DistributedManager) -> torch.Tensor:
    """Return a matrix with a row for each number: it times the place in the row, plus 1."""
    column = torch.tensor(values, dtype=torch.int64, device=manager.device).reshape(-1, 1)
    return column * torch.arange(1, _WIDTH + 1, device=manager.device) + 1


def _full(manager: DistributedManager) -> torch.Tensor:
    return torch.cat([_shard(rank, manager) for rank in range(manager.world_size)])


def _all_gather_v(manager: DistributedManager) -> bool:
    return torch.equal(collectives.all_gather_v(_shard(manager.rank, manager)), _full(manager))


def _gather_v(manager: DistributedManager) -> bool:
    dst = manager.world_size - 1
    expected = _full(manager) if manager.rank == dst else _rows([], manager)
    return torch.equal(collectives.gather_v(_shard(manager.rank, manager), dst=dst), expected)


def _scatter_v(manager: DistributedManager) -> bool:
    src = manager.world_size - 1
    full = _full(manager) if manager.rank == src else None
    return torch.equal(collectives.scatter_v(full, _sizes(manager), src=src), _shard(manager.rank, manager))


def _reduce_scatter_v(manager: DistributedManager) -> bool:
    size, sizes = manager.world_size, _sizes(manager)
    full = _full(manager) + manager.rank
    expected = _shard(manager.rank, manager) * size + size * (size - 1) // 2
    return torch.equal(collectives.reduce_scatter_v(full, sizes), expected)


def _exchanged(manager: DistributedManager) -> tuple[list[list[int]], torch.Tensor]:
    """Return how many rows each rank sends to each, and what this one must receive: row number size * sender + me."""
    size, rank = manager.world_size, manager.rank
    slices = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    return slices, _rows([size * i + rank for i in range(size) for _ in range(slices[i][rank])], manager)


def _all_to_all_v(manager: DistributedManager) -> bool:
    size, rank, (slices, expected) = manager.world_size, manager.rank, _exchanged(manager)
    sent = _rows([size * rank + j for j in range(size) for _ in range(slices[rank][j])], manager)
    return torch.equal(collectives.all_to_all_v(sent, slices), expected)


def _indexed_all_to_all_v(manager: DistributedManager) -> bool:
    size, rank, (slices, expected) = manager.world_size, manager.rank, _exchanged(manager)
    mine = _rows([size * rank + row for row in range(size)], manager)
    indices = [torch.full((length,), j, device=manager.device) for j, length in enumerate(slices[rank])]
    return torch.equal(collectives.indexed_all_to_all_v(mine, indices, slices), expected)


def _distributed_transpose(manager: DistributedManager) -> bool:
    full, rank, size = _full(manager), manager.rank, manager.world_size
    columns = torch.split(full, split_sizes(_WIDTH, size), dim=1)[rank]
    rows = torch.split(full, split_sizes(len(full), size))[rank]
    return torch.equal(collectives.distributed_transpose(columns, 0, 1), rows)


def _fused_all_reduce(manager: DistributedManager) -> bool:
    halves, few = (torch.arange(length, device=manager.device) * 0.5 for length in (_WIDTH, 7))
    total = collectives.fused_all_reduce({"halves": halves, "ranks": few + manager.rank % 7})
    size, ranks = manager.world_size, sum(rank % 7 for rank in range(manager.world_size))
    return torch.equal(total["halves"], halves * size) and torch.equal(total["ranks"], few * size + ranks)


def _broadcast_data(manager: DistributedManager) -> bool:
    src, large = manager.world_size - 1, _rows(list(range(16)), manager)
    word, got = collectives.broadcast_data(("exact", large) if manager.rank == src else ("", large + 1), src)
    return word == "exact" and torch.equal(got, large)


def _object_of(rank: int) -> dict[str, object]:
    return {"rank": rank, "text": "x" * (rank % 5), "list": list(range(rank % 3))}


def _gather_objects(manager: DistributedManager) -> bool:
    dst = manager.world_size - 1
    expected = [_object_of(rank) for rank in range(manager.world_size)] if manager.rank == dst else None
    return collectives.gather_objects(_object_of(manager.rank), dst) == expected


def _all_gather_objects(manager: DistributedManager) -> bool:
    expected = [_object_of(rank) for rank in range(manager.world_size)]
    return collectives.all_gather_objects(_object_of(manager.rank)) == expected


def _all_reduce(manager: DistributedManager) -> bool:
    size, is_exact = manager.world_size, True
    for items in (_FEW.to(manager.device), _MANY.to(manager.device)):
        total = items + manager.rank
        dist.all_reduce(total)
        is_exact &= torch.equal(total, items * size + size * (size - 1) // 2)
    return is_exact


def _all_gather(manager: DistributedManager) -> bool:
    is_exact = True
    for length in (len(_FEW) // manager.world_size + 1, len(_MANY) // manager.world_size + 1):
        expected = torch.arange(length * manager.world_size, device=manager.device)
        whole = torch.zeros_like(expected)
        all_gather_single(whole, torch.split(expected, length)[manager.rank].clone())
        is_exact &= torch.equal(whole, expected)
    return is_exact


def _barrier(manager: DistributedManager) -> bool:
    """The last rank arrives late: a rank that has left the barrier must see that it arrived."""
    store_group, number = manager._state.job.store_group(), next(manager._state.job.barriers["of the check"])
    if store_group is None:
        return False
    late = protocol.message(number, "of the check")
    if store_group.rank == store_group.size - 1:
        time.sleep(timing.CHECK_LATE)
        store_group.store.set(late, "here")
    dist.barrier()
    return bool(store_group.store.check([late]))


def _send_and_recv(manager: DistributedManager) -> bool:
    is_exact = True
    for items in (_FEW.to(manager.device), _MANY.to(manager.device)):
        received = torch.zeros_like(items)
        pass_on(items + manager.rank, received, manager)
        is_exact &= torch.equal(received, items + (manager.rank - 1) % manager.world_size)
    return is_exact


PROOFS: Mapping[str, Proof] = {
    "all_gather_v": _all_gather_v,
    "gather_v": _gather_v,
    "scatter_v": _scatter_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all_v": _all_to_all_v,
    "indexed_all_to_all_v": _indexed_all_to_all_v,
    "distributed_transpose": _distributed_transpose,
    "fused_all_reduce": _fused_all_reduce,
    "broadcast_data": _broadcast_data,
    "gather_objects": _gather_objects,
    "all_gather_objects": _all_gather_objects,
}
PROOFS_OF_TORCH: Mapping[str, Proof] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "barrier": _barrier,
    "send and recv": _send_and_recv,
}


def proofs_for(manager: DistributedManager) -> dict[str, Proof]:
    """Return what can be proved in this job, by name: on one rank, what distman does alone."""
    return {**PROOFS, **(PROOFS_OF_TORCH if manager.world_size > 1 else {})}
