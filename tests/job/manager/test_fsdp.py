"""Sharding a module: what it computes is what one process computes, and what cannot be sharded is refused anywhere."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distman import DistributedManager
from distman.errors import PlanMismatchError, UndefinedGroupError
from distman.testing import ranks


class Block(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, inputs):
        return inputs + self.scale * self.linear(inputs).tanh()


class Uneven(nn.Module):
    """Parameters that ranks cannot share evenly: odd dims, fewer rows than ranks, tied, unused, frozen."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=dtype)
        self.blocks = nn.ModuleList([Block(5, dtype) for _ in range(2)])
        self.last = nn.Linear(3, 5, bias=False, dtype=dtype)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(7, dtype=dtype), requires_grad=False)
        self.register_buffer("shift", torch.rand(5, dtype=dtype))

    def forward(self, inputs):
        hidden = self.first(inputs) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.last.weight * self.frozen.sum()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(module):
    return {name: None if one.grad is None else whole(one.grad) for name, one in module.named_parameters()}


def compare_with_one_process(sharded, rank, world_size):
    """Compare two backward passes with those of one process that has the first rank's weights."""
    torch.manual_seed(0)
    alone = Uneven()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), dict(alone.named_parameters())[name].detach())
    inputs = torch.randn(2 * world_size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for _ in range(2):
        for model, batch in ((sharded, inputs[rank::world_size]), (alone, inputs)):
            model.zero_grad()
            model(batch).square().mean().backward()
        torch.testing.assert_close(gradients(sharded), gradients(alone), rtol=1e-12, atol=1e-14)
    assert sharded.unused.grad is None


@ranks(1, 3)
def test_gradients_are_those_of_one_process(rank, world_size):
    for shard in (None, Block, lambda module: isinstance(module, nn.Linear) and module.in_features == 5):
        torch.manual_seed(rank)
        module = Uneven()
        assert DistributedManager().wrap_fsdp(module, shard=shard) is module
        if world_size > 1:
            assert [len(one.to_local()) for one in module.parameters()] != [len(one) for one in module.parameters()]
        compare_with_one_process(module, rank, world_size)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_calls = 0
        self.blocks = nn.Sequential(Block(5, torch.float64), nn.Dropout(0.5), Block(5, torch.float64))
        self.blocks[0].register_forward_hook(self.count)
        self.blocks[0].linear.register_forward_hook(self.count)

    def count(self, *_):
        self.num_calls += 1

    def forward(self, inputs):
        return self.blocks(inputs) + 0


@ranks(2)
def test_what_is_computed_again_has_the_same_gradients():
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        module = DistributedManager().wrap_fsdp(Nested(), shard=(Block, nn.Linear), checkpoint_activations=again)
        for _ in range(2):
            module.zero_grad()
            module(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
        found.append((module.num_calls, gradients(module)))
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
    assert found[1][0] > found[0][0] == 4


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])

    def forward(self, inputs, branch):
        return self.branches[branch](inputs)


@ranks(1, 2)
def test_unused_parameters_are_refused_where_torch_cannot_look_for_them(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    manager = DistributedManager()
    manager.wrap_fsdp(Either())
    manager.find_unused_parameters = True
    with pytest.raises(ValueError, match=r"must be False for wrap_fsdp with torch .*, got True\. Install torch 2\.12"):
        manager.wrap_fsdp(Either())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@ranks(2, 3)
def test_gradients_are_means_whatever_their_dtype(rank, world_size, dtype):
    module = DistributedManager().wrap_fsdp(nn.Linear(1, 4, bias=False, dtype=dtype))
    module(torch.full((1, 1), float(rank), dtype=dtype)).sum().backward()
    torch.testing.assert_close(whole(module.weight.grad), torch.full((4, 1), (world_size - 1) / 2, dtype=dtype))


@pytest.mark.torch("2.12")
@ranks(2)
def test_ranks_may_use_different_parameters_where_the_variable_says_so(rank):
    manager = DistributedManager()
    manager.find_unused_parameters = True
    module = manager.wrap_fsdp(Either())
    module(torch.full((1, 1), rank + 1.0), rank).sum().backward()
    assert [whole(one.grad).item() for one in module.parameters()] == [0.5, 1.0]


@ranks(4)
def test_hybrid_sharding_has_replicas_of_the_shards(rank):
    manager = DistributedManager()
    manager.initialize_mesh((2, 2), ("replicas", "shards"))
    torch.manual_seed(rank)
    module = manager.wrap_fsdp(Uneven(), mesh=("replicas", "shards"), shard=[Block])
    assert len(module.first.weight.to_local()) == (3 if rank % 2 == 0 else 2)
    compare_with_one_process(module, rank, 4)
    half = manager.wrap_fsdp(nn.Linear(4, 4), mesh="shards")  # two models, one in each half
    half(torch.full((1, 4), float(rank))).sum().backward()
    assert whole(half.weight.grad)[0, 0] == rank // 2 * 2 + 0.5


@ranks(2)
def test_low_precision_is_for_computing_alone():
    module = DistributedManager().wrap_fsdp(Uneven(torch.float32), shard=Block, mixed_precision="bf16")
    seen = []
    module.blocks[0].linear.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs.dtype))
    outputs = module(torch.ones(1, 3))
    outputs.sum().backward()
    assert (outputs.dtype, seen) == (torch.float32, [torch.bfloat16])
    assert {one.dtype for one in module.parameters()} == {torch.float32}
    assert module.first.weight.grad.dtype == torch.float32


@ranks(2)
def test_ranks_with_different_models_hear_of_it(rank):
    manager = DistributedManager()
    with pytest.raises(PlanMismatchError, match=r"operation wrap_fsdp, model Linear, tensors 2.*elements 1[02]"):
        manager.wrap_fsdp(nn.Linear(4 + rank, 2))
    with pytest.raises(PlanMismatchError, match=r"parts 0"):
        manager.wrap_fsdp(Uneven(), shard=Block if rank else None)


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def transposed():
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(torch.zeros(2, 3).t())
    return module


REFUSED = {
    "no module": (lambda: "x", {}, TypeError, r"module must be a torch\.nn\.Module, got a str\. Pass the model"),
    "no parameters": (nn.ReLU, {}, ValueError, "module must have parameters, got none"),
    "a number": (Number, {}, ValueError, r"must have a dim, got the number scale\. Give it the shape \(1,\)"),
    "strides": (transposed, {}, ValueError, r"must be contiguous, got weight with strides \(1, 3\)"),
    "types": (
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()),
        {},
        ValueError,
        r"must have one data type, got 0\.bias of torch\.float32 and 1\.bias of torch\.float64",
    ),
    "a container": (Uneven, {"shard": nn.ModuleList}, ValueError, r"must have a forward\(\), got a ModuleList"),
    "no such part": (Uneven, {"shard": nn.LSTM}, ValueError, "shard must find modules .* It has Block, Linear, Modu"),
    "nothing to compute again": (
        Uneven,
        {"checkpoint_activations": True},
        ValueError,
        "checkpoint_activations must be used with shard, got shard=None",
    ),
    "tied": (
        Uneven,
        {"shard": nn.Linear},
        ValueError,
        r"tied .* together, got first\.weight and last\.weight, which are",
    ),
    "no class": (Uneven, {"shard": ["Block"]}, TypeError, r"shard must be classes of modules.*got \['Block'\]"),
    "option": (Uneven, {"reshard_after_foward": True}, TypeError, "Did you mean reshard_after_forward"),
    "precision": (
        Uneven,
        {"mixed_precision": "bfloat16"},
        ValueError,
        "mixed_precision must be 'bf16', 'fp16', a Mixed",
    ),
    "axis": (Uneven, {"mesh": "data"}, UndefinedGroupError, "data"),
}


@ranks(1, 2)
def test_what_cannot_be_sharded_is_refused_on_any_number_of_ranks():
    manager = DistributedManager()
    for make, options, kind, message in REFUSED.values():
        with pytest.raises(kind, match=message):
            manager.wrap_fsdp(make(), **options)
    mesh = manager.initialize_mesh((1, 1, -1), ("a", "b", "c"))
    with pytest.raises(ValueError, match=r"mesh must have one axis, .* or two, .*, got 3"):
        manager.wrap_fsdp(Uneven(), mesh=mesh)
    assert (
        manager.wrap_fsdp(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()), shard=nn.Linear)[0].in_features == 1
    )
