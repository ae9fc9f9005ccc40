"""How long operations on the real backend and device take, by the definitions of nccl-tests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distman._base import timing
from distman._coordination.wait_scope import collective
from distman._torch_internals import all_gather_single, reduce_scatter_single
from distman.collectives import control_device
from distman.manager import DistributedManager

_ITEM_BYTES = 4  # of a float32
_FEWEST, _MOST = 5, 100  # rounds: enough for a median, and no more than small messages need
_MATRIX_SIZE = {"cpu": 512, "cuda": 4096}
_SHARED_OUT = ("all_gather", "all_to_all", "reduce_scatter")  # each rank has an equal part of the bytes


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
) -> Measurement:
    """Return how long one of the operations that ``distman bench`` knows takes. Collective.

    Three rounds warm up, and say how many fit into 0.2 seconds, of 5 to 100. nccl-tests, doc/PERFORMANCE.md, says what
    sizes, algorithm bandwidth and bus bandwidth are.
    """
    num_bytes = rounded_up(operation, num_bytes, manager.world_size)
    run = _prepare(operation, num_bytes, manager)
    run()
    estimate = largest(min(timed(run, manager.device) for _ in range(2)), manager)
    rounds = num_rounds or min(max(_FEWEST, int(timing.BENCH_OPERATION / max(estimate, 1e-9))), _MOST)
    own = statistics.median(timed(run, manager.device) for _ in range(rounds))
    seconds = largest(own, manager)
    bandwidth = num_bytes / seconds
    share_of_others = (manager.world_size - 1) / manager.world_size
    factors = {"all_reduce": 2 * share_of_others, **dict.fromkeys(_SHARED_OUT, share_of_others)}
    return Measurement(operation, num_bytes, rounds, seconds, bandwidth, bandwidth * factors.get(operation, 1.0))


def rounded_up(operation: str, num_bytes: int, world_size: int) -> int:
    """Return the smallest size of at least so many bytes that an operation can have: whole numbers for each rank."""
    step = _ITEM_BYTES * (world_size if operation in _SHARED_OUT else 1)
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
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


@collective
def largest(number: float, manager: DistributedManager) -> float:
    """Return the largest of the ranks' numbers, on all of them. Collective."""
    device = control_device(manager.resolve_group(None))
    numbers = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.item()


def pass_on(sent: torch.Tensor, received: torch.Tensor, manager: DistributedManager) -> None:
    """Send a tensor to the next rank of the ring, and receive that of the one before, of the same shape. Collective."""
    following, preceding = ((manager.rank + step) % manager.world_size for step in (1, -1))
    send, receive = dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, preceding)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _prepare(operation: str, num_bytes: int, manager: DistributedManager) -> Callable[[], object]:
    """Return what to call, on buffers of the number of bytes of all ranks or of one, as nccl-tests count them."""

    def buffer(size: int) -> torch.Tensor:
        return torch.zeros(size // _ITEM_BYTES, dtype=torch.float32, device=manager.device)

    whole = buffer(num_bytes)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, src=0)
    if operation in ("all_gather", "reduce_scatter"):
        part = buffer(num_bytes // manager.world_size)
        is_gather = operation == "all_gather"
        return lambda: all_gather_single(whole, part) if is_gather else reduce_scatter_single(part, whole)
    received = buffer(num_bytes)
    if operation == "all_to_all":
        return lambda: dist.all_to_all_single(received, whole)
    return lambda: pass_on(whole, received, manager)
