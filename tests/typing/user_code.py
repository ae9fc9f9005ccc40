"""What users write, as type checkers see it; it is checked and not run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import distman
from distman import (
    DistributedManager,
    JobFailed,
    ParallelExecutor,
    on_local_rank,
    on_rank,
    parallelize_on_gpus,
    rank_zero_only,
)
from distman.collectives import (
    FusedWork,
    all_gather_objects,
    all_gather_v,
    broadcast_data,
    fused_all_reduce,
    gather_objects,
    scatter_v,
)
from distman.data import EvaluationLoader, TrainingLoader, distributed_loader
from distman.fft import fft2
from distman.handler import NNHandler
from distman.metrics import reduce_loss

if TYPE_CHECKING:
    from typing import assert_type

manager = DistributedManager.initialize()
assert_type(manager, DistributedManager)
assert_type(manager.rank, int)
assert_type(manager.world_size, int)
assert_type(manager.device, torch.device)
assert_type(manager.is_main, bool)
assert_type(manager.wrap_ddp(nn.Linear(1, 1)), nn.Module)
assert_type(manager.wrap_fsdp(nn.Linear(1, 1), mesh="data", shard=[nn.ReLU]), nn.Module)

dataset = TensorDataset(torch.arange(8.0))
assert_type(distributed_loader(dataset, batch_size=2), TrainingLoader)
assert_type(distributed_loader(dataset, evaluation=True), EvaluationLoader)
for batch in distributed_loader(dataset, shuffle=False):
    total = manager.wrap_ddp(nn.Linear(1, 1))(batch[0]).sum()

assert_type(fused_all_reduce([torch.ones(2)]), list[Tensor])
assert_type(fused_all_reduce({"loss": torch.ones(2)}, op="avg"), dict[str, Tensor])
assert_type(fused_all_reduce(torch.ones(2), async_op=True), tuple[Tensor, FusedWork])
assert_type(all_gather_v(torch.ones(2)), Tensor)
assert_type(fft2(torch.ones(4, 4)), Tensor)
assert_type(broadcast_data({"a": 1}), dict[str, int])
assert_type(gather_objects(3), "list[int] | None")
assert_type(all_gather_objects(3), list[int])
assert_type(reduce_loss(torch.ones(()), 3), "float | None")


@on_rank(0)
def first(number: int) -> str:
    return str(number)


@on_rank(0, broadcast=True)
def told(number: int) -> str:
    return str(number)


@rank_zero_only
def only(number: int, *, name: str) -> str:
    return f"{name}{number}"


@on_local_rank(0)
def local() -> int:
    return 1


assert_type(first(1), "str | None")
assert_type(told(1), str)
assert_type(only(1, name="a"), "str | None")
assert_type(local(), "int | None")


@parallelize_on_gpus()
def on_all(device: torch.device, factor: float) -> Tensor:
    return torch.ones(2, device=device) * factor


@parallelize_on_gpus(pass_device=False)
def without_device(factor: float) -> float:
    return factor


assert_type(on_all(2.0), list[Tensor])
assert_type(without_device(2.0), list[float])
without_device.shutdown()

with ParallelExecutor() as executor:
    assert_type(executor.submit(without_device, 1.0), Future[list[float]])
    assert_type(executor.map(str, [1, 2]), Iterator[str])

assert_type(distman.run(first, 1, n=2), "list[str | None]")

try:
    manager.barrier("all", timeout=3)
except JobFailed as error:
    assert_type(error.rank, int)

handler = NNHandler(nn.Linear(1, 1))
assert_type(handler, NNHandler)
assert_type(scatter_v(torch.ones(4), [2, 2]), Tensor)
