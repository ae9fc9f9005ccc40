"""Within torch.compile each call ends a graph and is right, forward and backward; fused_all_reduce is in the graph."""

import inspect

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distman import collectives, fft, mappings, metrics
from distman.testing import ranks

pytestmark = [
    pytest.mark.gloo_only("what a graph leaves out does not depend on the backend"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch looks at it, and would hide that
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # which torch 2.8 does itself
]
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _cold():
    torch._dynamo.reset()


def halves(size):
    return [4 - size + 1] + [1] * (size - 1)


def marked(x, _):
    layer = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    mappings.mark_module_as_shared(layer)
    result = layer(x)
    mappings.unmark_module_as_shared(layer)
    return result


# Each takes a tensor of 4 x 4 that requires a gradient and the number of ranks, and returns a tensor. Others are kept
# out of graphs by what these have, too.
CALLS = {
    "all_gather_v": lambda x, _: collectives.all_gather_v(x),
    "scatter_v": lambda x, size: collectives.scatter_v(x, halves(size)),
    "fused_all_reduce": lambda x, _: collectives.fused_all_reduce({"a": x})["a"],
    "broadcast_data": lambda x, _: x * collectives.broadcast_data(x.detach().sum()),
    "broadcast_if_ddp": lambda x, _: x * collectives.broadcast_if_ddp(x.detach().sum()),
    "copy_to_parallel_region": lambda x, _: mappings.copy_to_parallel_region(x),
    "mark_module_as_shared, unmark_module_as_shared": marked,
    "aggregate_metrics": lambda x, _: x * metrics.aggregate_metrics({"a": x.sum(), "b": 1.0})["a"],
    "rfftn": lambda x, _: torch.view_as_real(fft.rfftn(x)),
}
NAMES = {name for names in CALLS for name in names.split(", ")}


def test_every_other_public_function_is_kept_out_in_the_same_way():
    public = {
        name: getattr(module, name) for module in (collectives, mappings, metrics, fft) for name in module.__all__
    }
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    assert functions.keys() > NAMES
    assert [name for name in functions.keys() - NAMES if not functions[name]._torchdynamo_disable] == []


def around(call, size):
    """A function with the call in its middle, and what is different on each rank after it."""
    return lambda x, scale: (call(x.sin(), size).cos() * scale).sum()


def gradient(function, rank, step):
    x = torch.linspace(0, 1 + step, 16).reshape(4, 4).add(rank).requires_grad_()
    loss = function(x, rank + 1.0)
    loss.backward()
    return loss.detach(), x.grad


@pytest.mark.parametrize("name", CALLS)
@ranks(2)
def test_a_call_within_a_compiled_function(rank, world_size, name):
    torch.manual_seed(0)
    plain = around(CALLS[name], world_size)
    compiled = torch.compile(plain, backend="aot_eager")
    for step in range(2):
        torch.testing.assert_close(gradient(compiled, rank, step), gradient(plain, rank, step))


@ranks(2)
def test_a_backward_pass_within_a_compiled_function(rank):
    def step(x):
        mine = x.sin().detach().requires_grad_()
        (collectives.all_gather_v(mine, [4, 4]) * (rank + 1)).cos().sum().backward()
        return mine.grad * 2

    x = torch.linspace(0, 1, 4) + rank
    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(x), step(x))


class Model(torch.nn.Module):
    """Layers with exchanges between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        x = collectives.all_gather_v(self.first(x).sin(), dim=0)
        x = mappings.reduce_from_parallel_region(x.cos())
        return self.last(collectives.fused_all_reduce([x])[0]).tanh().sum()


WRAPPED = {
    "DDP around": lambda compiler: DistributedDataParallel(torch.compile(Model(), backend=compiler)),
    "DDP inside": lambda compiler: torch.compile(DistributedDataParallel(Model()), backend=compiler),
    "FSDP2 around": lambda compiler: fully_shard(torch.compile(Model(), backend=compiler)),
    "FSDP2 inside": lambda compiler: torch.compile(fully_shard(Model()), backend=compiler),
}


@pytest.mark.parametrize(
    "name",
    # With gloo of torch 2.8, FSDP2 by itself adds gradients where it should take their mean.
    [pytest.param(name, marks=[pytest.mark.torch("2.9")] * name.startswith("FSDP2")) for name in WRAPPED],
)
@ranks(2)
def test_a_model_that_is_compiled_and_parallel(rank, name):
    model = WRAPPED[name]("aot_eager")
    plain = Model()
    for step in range(2):
        x = torch.linspace(0, 1, 8).reshape(2, 4) + rank + step
        model.zero_grad()
        plain.zero_grad()
        model(x).backward()
        plain(x).backward()
        grads = [one.grad for one in model.parameters()]
        full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in grads]
        means = [one / 2 for one in collectives.fused_all_reduce([one.grad for one in plain.parameters()])]
        torch.testing.assert_close(full, means)


@pytest.mark.parametrize("compiler", BACKENDS)
@ranks(2)
def test_fused_all_reduce_is_part_of_a_graph_and_others_say_why_they_are_not(compiler):
    fused = torch.compile(collectives.fused_all_reduce, backend=compiler, fullgraph=True)
    assert fused(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="it exchanges messages with other ranks"):
        torch.compile(lambda x: collectives.all_gather_v(x), backend=compiler, fullgraph=True)(torch.ones(2))
    assert collectives.all_gather_v(torch.ones(1)).tolist() == [1, 1]
