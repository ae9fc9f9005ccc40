"""How often the host would wait for a GPU: never in a collective whose sizes are known, never in a training step."""

import pytest
import torch

from distman.collectives import (
    all_gather_v,
    all_to_all_v,
    distributed_transpose,
    fused_all_reduce,
    gather_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.handler import Callback
from distman.mappings import copy_to_parallel_region, gather_from_parallel_region, reduce_from_parallel_region
from distman.testing import ranks

from .handler.problems import GLOBAL_BATCH, make_handler, regression
from .synchronizations import Synchronizations

SIZES = [1, 3]
OPERATIONS = {
    "all_gather_v": lambda shard, _: all_gather_v(shard, SIZES),
    "gather_v": lambda shard, _: gather_v(shard, SIZES),
    "scatter_v": lambda _, full: scatter_v(full, SIZES),
    "reduce_scatter_v": lambda _, full: reduce_scatter_v(full, SIZES),
    "all_to_all_v": lambda _, full: all_to_all_v(full, [SIZES, SIZES]),
    "distributed_transpose": lambda _, full: distributed_transpose(full, 0, 1),
    "copy_to_parallel_region": lambda _, full: copy_to_parallel_region(full).square(),
    "reduce_from_parallel_region": lambda _, full: reduce_from_parallel_region(full),
    "gather_from_parallel_region": lambda _, full: gather_from_parallel_region(full, 0),
}


@ranks(2)
def test_none_in_collectives_with_known_sizes_and_their_gradients(rank):
    full = torch.randn(4, 4, requires_grad=True)
    shard = torch.randn(SIZES[rank], 4, requires_grad=True)
    all_gather_v(shard, SIZES)  # the first exchange of a group reads where each other's memory is
    found = {}
    for name, operation in OPERATIONS.items():
        with Synchronizations() as counted:
            operation(shard, full).sum().backward()
        found[name] = dict(counted.of)
    assert found == {name: {} for name in OPERATIONS}


@ranks(2)
def test_none_before_an_asynchronous_call_is_waited_for():
    fused_all_reduce(torch.ones(1))
    with Synchronizations() as counted:
        _, work = fused_all_reduce({"a": torch.ones(3), "b": torch.ones(())}, async_op=True)
    work.wait()
    assert not counted.of


def test_the_count_sees_what_reads_a_tensor():
    tensor = torch.ones(3)
    with Synchronizations() as counted:
        bool(tensor[0]), tensor.tolist(), tensor.to("cpu"), tensor[tensor > 0], tensor.nonzero(), tensor.numpy()
    assert counted.of == dict.fromkeys(["_local_scalar_dense", "tolist", "to", "index", "nonzero", "numpy"], 1)


class CountPerStep(Callback):
    """Notes how many there were in each step."""

    def __init__(self, counted):
        self.counted, self.totals = counted, []

    def on_step_end(self, *_):
        self.totals.append(self.counted.of.total())

    @property
    def per_step(self):
        return [later - earlier for earlier, later in zip(self.totals, self.totals[1:], strict=False)]


@ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({"check_every": 32}, 0),  # what a GPU gets without being asked
        ({"check_every": 32, "clip_norm": 1.0, "accumulate": 2, "amp": "bf16"}, 0),
        ({"non_finite": "ignore", "ema_decay": 0.9}, 0),
        ({"check_every": 1}, 1),
        ({"non_finite": "skip"}, 1),
    ],
    ids=str,
)
def test_a_training_step_waits_only_where_it_is_looked_at(world_size, options, each):
    data = regression(torch.float32, 4 * GLOBAL_BATCH)  # a rank without samples would copy random states of the host
    handler = make_handler(GLOBAL_BATCH // world_size, dtype=torch.float32, data=data)
    handler.set_optimizer(torch.optim.SGD, lr=0.01)  # on the CPU, Adam reads its number of steps, which is there
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
    with Synchronizations() as counted:
        steps = CountPerStep(counted)
        handler.add_callback(steps)
        handler.train(1, **options)
    assert steps.per_step == [each] * (3 if "accumulate" not in options else 1)


class Looks(CountPerStep):
    def on_step_records(self, _, records):
        self.looks = [*getattr(self, "looks", []), int(records[-1]["step"])]


@ranks(1, 2)
def test_the_numbers_of_steps_are_read_together(world_size, monkeypatch):
    monkeypatch.setattr("distman._base.timing.NUMBERS_UNREAD", 1e9)  # however slow the steps are
    handler = make_handler(GLOBAL_BATCH // world_size, data=regression(torch.float64, 5 * GLOBAL_BATCH))
    handler.set_optimizer(torch.optim.SGD, lr=0.01)
    with Synchronizations() as counted:
        steps = Looks(counted)
        handler.add_callback(steps)
        handler.train(1, check_every=32, clip_norm=1.0)
    assert steps.looks == [1, 5]
    assert steps.per_step == [0, 0, 0, 0]  # the first look is before all of these, the last one after them


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_no_step_waits():
    class Strict(Callback):
        def on_step_end(self, _, step):
            torch.cuda.set_sync_debug_mode("error" if 1 < step < 4 else "default")

    handler = make_handler(GLOBAL_BATCH, dtype=torch.float32)
    handler.set_train_loader(regression(torch.float32), batch_size=GLOBAL_BATCH, cached=True)
    handler.add_callback(Strict())
    try:
        handler.train(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
