"""How long operations on the real backend and device take, by the definitions of nccl-tests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import collective
from distman._torch_internals import all_gather_single, reduce_scatter_single
from distman.collectives._numbers import control_device
from distman.manager import DistributedManager

_ITEM_BYTES = 4  # of a float32
_FEWEST, _MOST = 5, 100  # rounds: enough for a median, and no more than small messages need
_MATRIX_SIZE = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True)
class Operation:
    # Takes the number of bytes of all ranks or of one, as nccl-tests count them; returns what to call.
    prepare: Callable[[int, DistributedManager], Callable[[], object]]
    bus_factor: Callable[[int], float]  # from the algorithm bandwidth to that of the wires, for a number of ranks
    is_shared_out: bool = False  # whether each rank has an equal part of the bytes


@dataclass(frozen=True)
class Measurement:
    operation: str
    num_bytes: int
    num_rounds: int
    seconds: float  # the median over the rounds, on the slowest rank
    algorithm_bandwidth: float  # size over time, in bytes a second
    bus_bandwidth: float  # what each rank's wire carries, in bytes a second; to be compared with the hardware's


@collective
def measure(
    operation: str,
    num_bytes: int,
    manager: DistributedManager,
    *,
    num_rounds: int | None = None,
    allowed_seconds: float = 0.2,
) -> Measurement:
    """Return how long an operation of :data:`OPERATIONS` takes. Collective.

    Three rounds warm up, and say how many fit into ``allowed_seconds``, of 5 to 100.

    Source:
        nccl-tests, doc/PERFORMANCE.md: sizes, algorithm bandwidth and bus bandwidth.
    """
    num_bytes = rounded_up(operation, num_bytes, manager.world_size)
    run = OPERATIONS[operation].prepare(num_bytes, manager)
    run()
    estimate = largest(min(timed(run, manager.device) for _ in range(2)), manager)
    rounds = num_rounds or min(max(_FEWEST, int(allowed_seconds / max(estimate, 1e-9))), _MOST)
    own = statistics.median(timed(run, manager.device) for _ in range(rounds))
    seconds = largest(own, manager)
    bandwidth = num_bytes / seconds
    bus = bandwidth * OPERATIONS[operation].bus_factor(manager.world_size)
    return Measurement(operation, num_bytes, rounds, seconds, bandwidth, bus)


def rounded_up(operation: str, num_bytes: int, world_size: int) -> int:
    """Return the smallest size of at least so many bytes that an operation can have: whole numbers for each rank.

    >>> rounded_up("all_gather", 8, 4), rounded_up("all_reduce", 9, 4)
    (16, 12)
    """
    step = _ITEM_BYTES * (world_size if OPERATIONS[operation].is_shared_out else 1)
    return -(-num_bytes // step) * step


def measure_compute(device: torch.device, *, allowed_seconds: float = 0.3) -> float:
    """Return the median seconds of a matrix product. Ranks that share a core slow each other down, so all measure."""
    size = _MATRIX_SIZE.get(device.type, 1024)
    matrix = torch.full((size, size), 1.0 / size, device=device)

    def run() -> None:
        torch.mm(matrix, matrix)

    timed(run, device)
    seconds = [timed(run, device)]
    until = time.perf_counter() + allowed_seconds
    while time.perf_counter() < until:
        seconds.append(timed(run, device))
    return statistics.median(seconds)


def timed(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


@collective
def largest(number: float, manager: DistributedManager) -> float:
    """Return the largest of the ranks' numbers, on all of them. Collective."""
    device = control_device(manager.resolve_group(None), manager.device)
    numbers = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.item()


def pass_on(sent: torch.Tensor, received: torch.Tensor, manager: DistributedManager) -> None:
    """Send a tensor to the next rank of the ring, and receive that of the one before, of the same shape. Collective."""
    following, preceding = ((manager.rank + step) % manager.world_size for step in (1, -1))
    send, receive = dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, preceding)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prepare_all_reduce(num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    whole = _buffer(num_bytes, manager)
    return lambda: dist.all_reduce(whole)


def _prepare_broadcast(num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    whole = _buffer(num_bytes, manager)
    return lambda: dist.broadcast(whole, src=0)


def _prepare_all_gather(num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    whole, part = _buffer(num_bytes, manager), _buffer(num_bytes // manager.world_size, manager)
    return lambda: all_gather_single(whole, part)


def _prepare_reduce_scatter(num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    whole, part = _buffer(num_bytes, manager), _buffer(num_bytes // manager.world_size, manager)
    return lambda: reduce_scatter_single(part, whole)


def _prepare_all_to_all(num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    sent, received = _buffer(num_bytes, manager), _buffer(num_bytes, manager)
    return lambda: dist.all_to_all_single(received, sent)


def _prepare_ring(num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    sent, received = _buffer(num_bytes, manager), _buffer(num_bytes, manager)
    return lambda: pass_on(sent, received, manager)


def _buffer(num_bytes: int, manager: DistributedManager) -> torch.Tensor:
    return torch.zeros(num_bytes // _ITEM_BYTES, dtype=torch.float32, device=manager.device)


def _share_of_others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _there_and_back(num_ranks: int) -> float:
    return 2 * _share_of_others(num_ranks)


def _as_it_is(_num_ranks: int) -> float:
    return 1.0


OPERATIONS = {
    "all_reduce": Operation(_prepare_all_reduce, _there_and_back),
    "all_gather": Operation(_prepare_all_gather, _share_of_others, is_shared_out=True),
    "all_to_all": Operation(_prepare_all_to_all, _share_of_others, is_shared_out=True),
    "broadcast": Operation(_prepare_broadcast, _as_it_is),
    "p2p": Operation(_prepare_ring, _as_it_is),
    "reduce_scatter": Operation(_prepare_reduce_scatter, _share_of_others, is_shared_out=True),
}
