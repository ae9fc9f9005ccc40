"""What messages can carry travels; what they cannot is refused on every rank that waits, and the group stays good."""

import dataclasses
import random

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from distman import DistributedManager, PlanMismatchError, RankFailedError
from distman.collectives import (
    all_gather_objects,
    all_gather_v,
    all_to_all_v,
    broadcast_data,
    distributed_transpose,
    fused_all_reduce,
    gather_objects,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.collectives._border import carried
from distman.fft import fft, rfft2
from distman.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    mark_module_as_shared,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from distman.metrics import aggregate_loss, aggregate_metrics, reduce_loss
from distman.testing import ranks

pytestmark = [
    pytest.mark.gloo_only("a rank of NCCL goes on while its GPU waits, and hears of a refusal in debug mode alone"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*[Ff]loat8", "ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


class Wrapper(torch.Tensor):
    """A tensor of another library, with operations of its own and no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[one.inner if isinstance(one, cls) else one for one in args], **(kwargs or {}))


class Named(torch.Tensor):
    """A tensor of another library that is an ordinary one with an attribute."""


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def alone():
    return DeviceMesh("cpu", [dist.get_rank()], _init_backend=False, _rank=0)


def within(transform):
    """Makes a call with what a transform of functions hands on in the place of a tensor."""
    return lambda call, tensor: transform(lambda one: (call(one), one.sum())[1], tensor)


def under(mode):
    def give(call, tensor):
        with mode():
            call(tensor)

    return give


def in_fake(call, tensor):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    call(mode.from_tensor(tensor))


MADE = {
    "a DTensor": lambda tensor: DTensor.from_local(tensor, alone(), [Replicate()], run_check=False),
    "a wrapper": Wrapper,
    "on the meta device": lambda tensor: tensor.to("meta"),
    "freed": freed,
    "functional": lambda tensor: torch._to_functional_tensor(tensor),
    "functional in Python": lambda tensor: FunctionalTensor(
        torch._to_functional_tensor(tensor), FunctionalTensor.__new__
    ),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    "jagged": lambda tensor: torch.nested.nested_tensor([tensor, tensor[:1]], layout=torch.jagged),
    "sparse": torch.Tensor.to_sparse,
    "in compressed rows": torch.Tensor.to_sparse_csr,
    "in the layout of MKL-DNN": torch.Tensor.to_mkldnn,
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8),
    "of 8 bits": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "unsigned": lambda tensor: tensor.to(torch.uint16),
    "of 17 dims": lambda tensor: tensor.reshape(*tensor.shape, *[1] * 15),
    "without a shape": lambda _: torch.nn.UninitializedParameter(),
}
KINDS = {
    **{name: (lambda call, tensor, make=make: call(make(tensor))) for name, make in MADE.items()},
    "fake": in_fake,
    "under FakeTensorMode": under(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "within grad": within(lambda function, tensor: torch.func.grad(function)(tensor)),
    "within vmap": within(lambda function, tensor: torch.func.vmap(function)(torch.stack([tensor, tensor]))),
    "within jvp": within(lambda function, tensor: torch.func.jvp(function, (tensor,), (tensor,))),
    "within make_fx": within(lambda function, tensor: make_fx(function)(tensor)),
    "within make_fx with fakes": within(lambda function, tensor: make_fx(function, tracing_mode="fake")(tensor)),
}
PICKLED = {
    *("on the meta device", "nested", "jagged", "sparse", "in compressed rows", "quantized", "of 8 bits", "unsigned"),
    *("of 17 dims", "a wrapper", "in the layout of MKL-DNN", "without a shape", "under FakeTensorMode"),
    "within make_fx",
}
"""What is pickled as it is, or by torch's own rules, so that objects may hold it."""
NUMBERS = {"of 8 bits", "unsigned", "of 17 dims"}
"""What is a number as good as any in a metric."""
# Each call takes a tensor of 4 x 4, the number of ranks, and the rank that is to refuse it.
WITH_TENSORS = {
    "all_gather_v": lambda tensor, *_: all_gather_v(tensor),
    "all_gather_v of sizes": lambda tensor, size, _: all_gather_v(tensor, [4] * size, dim=1),
    "gather_v": lambda tensor, *_: gather_v(tensor),
    "gather_v of sizes": lambda tensor, size, who: gather_v(tensor, [4] * size, dst=who),
    "scatter_v": lambda tensor, size, who: scatter_v(tensor, [4] + [0] * (size - 1), src=who),
    "reduce_scatter_v": lambda tensor, size, _: reduce_scatter_v(tensor, [4 - size + 1] + [1] * (size - 1)),
    "all_to_all_v": lambda tensor, size, _: all_to_all_v(tensor, [[4 - size + 1] + [1] * (size - 1)] * size),
    "indexed_all_to_all_v": lambda tensor, size, _: indexed_all_to_all_v(
        tensor, [torch.tensor([0, 2])] * size, [[2] * size] * size
    ),
    "indices": lambda tensor, size, _: indexed_all_to_all_v(
        torch.ones(4, 4), [torch.tensor([0]), *[tensor[0].long()] * (size - 1)], [[1] + [4] * (size - 1)] * size
    ),
    "distributed_transpose": lambda tensor, *_: distributed_transpose(tensor, 0, 1),
    "distributed_transpose of sizes": lambda tensor, size, _: distributed_transpose(tensor, 0, 1, sizes=[4] * size),
    "fused_all_reduce": lambda tensor, *_: fused_all_reduce(tensor),
    "fused_all_reduce of many": lambda tensor, *_: fused_all_reduce({"a": [torch.ones(4, 4), tensor]}),
    "fused_all_reduce of others": lambda tensor, *_: fused_all_reduce([torch.ones(3), tensor], op="max"),
    "fused_all_reduce at once": lambda tensor, *_: fused_all_reduce(tensor, async_op=True)[1].wait(),
    "reduce_from_parallel_region": lambda tensor, *_: reduce_from_parallel_region(tensor),
    "gather_from_parallel_region": lambda tensor, *_: gather_from_parallel_region(tensor),
    "gather_from_parallel_region of shapes": lambda tensor, size, _: gather_from_parallel_region(tensor, 0, [4] * size),
    "rfft2": lambda tensor, *_: rfft2(tensor),
    "rfft2 of sizes": lambda tensor, size, _: rfft2(tensor, sizes=[4] * size),
    "fft": lambda tensor, *_: fft(tensor),
}
WITH_NUMBERS = {
    "aggregate_metrics": lambda tensor, *_: aggregate_metrics({"a": 1.0, "b": tensor}),
    "aggregate_loss": lambda tensor, *_: aggregate_loss(tensor),
    "reduce_loss": lambda tensor, size, who: reduce_loss(tensor, size - 1 - who),
}
WITH_OBJECTS = {
    "all_gather_objects": lambda tensor, *_: all_gather_objects({"a": [tensor]}),
    "gather_objects": lambda tensor, size, who: gather_objects(tensor, dst=size - 1 - who),
    "broadcast_data": lambda tensor, _, who: broadcast_data(tensor, src=who),
}
CALLS = {**WITH_TENSORS, **WITH_NUMBERS, **WITH_OBJECTS}


def watch(monkeypatch):
    """Start a job whose ranks hear of each other."""
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.setattr("distman._base.timing.WATCH_EVERY", 0.01)
    DistributedManager.initialize(timeout=60)


def fits(kind, call):
    if call in WITH_OBJECTS:
        return kind not in PICKLED
    if call == "indices":
        return kind in ("within grad", "within vmap", "within make_fx", "under FakeTensorMode", "fake")
    return call not in WITH_NUMBERS or kind not in NUMBERS


PAIRS = [(kind, call) for kind in KINDS for call in CALLS if fits(kind, call)]


def exchange_rightly(rank, world_size, draw):
    """Some right call of the same group."""
    choice = draw.randrange(4)
    if choice == 0:
        sizes = [draw.randint(0, 3) for _ in range(world_size)]
        full = all_gather_v(torch.full((sizes[rank], 2), rank), sizes)
        assert full[:, 0].tolist() == [one for one, size in enumerate(sizes) for _ in range(size)]
    elif choice == 1:
        assert fused_all_reduce([torch.tensor(1.0), torch.tensor(2.0)])[1].item() == 2 * world_size
    elif choice == 2:
        assert all_gather_objects(rank) == list(range(world_size))
    else:
        mine = torch.ones(5, requires_grad=True)
        reduce_scatter_v(mine, [5] + [0] * (world_size - 1)).sum().backward()
        assert mine.grad.tolist() == [1] * 5


def refuse_and_go_on(rank, world_size, who, kind, name):
    call = CALLS[name]
    shape = (1, 1) if name in WITH_NUMBERS else (4, 4)
    if rank == who:
        with pytest.raises((TypeError, ValueError), match=r"(?s) must .*, got .*\. \w+.*\.$") as caught:
            KINDS[kind](lambda tensor: call(tensor, world_size, who), torch.ones(shape))
        assert type(caught.value) in (TypeError, ValueError)
    else:
        errors = (PlanMismatchError, RankFailedError)
        with pytest.raises(errors, match=rf"(?s)rank {who}\b.*(Type|Value)Error: .* must .*, got "):
            call(torch.ones(shape), world_size, who)


@pytest.mark.parametrize("seed", range(10))
@ranks(3, manager=False)
def test_what_is_refused_on_one_rank_is_refused_on_all_and_the_group_stays_good(monkeypatch, rank, world_size, seed):
    watch(monkeypatch)
    draw = random.Random(seed)  # noqa: S311 - no secret
    pairs = [PAIRS[index] for index in range(seed, len(PAIRS), 10)]
    for kind, name in draw.sample(pairs, 25):
        who = draw.randrange(world_size)
        refuse_and_go_on(rank, world_size, who, kind, name)
        exchange_rightly(rank, world_size, draw)


DIFFERENTIABLE = {
    "all_gather_v": lambda tensor, size: all_gather_v(tensor, [4] * size),
    "gather_v": lambda tensor, _: gather_v(tensor),
    "scatter_v": lambda tensor, size: scatter_v(tensor, [4] + [0] * (size - 1)),
    "reduce_scatter_v": lambda tensor, size: reduce_scatter_v(tensor, [4] + [0] * (size - 1)),
    "all_to_all_v": lambda tensor, size: all_to_all_v(tensor, [[4 - size + 1] + [1] * (size - 1)] * size),
    "indexed_all_to_all_v": lambda tensor, size: indexed_all_to_all_v(
        tensor, [torch.tensor([3, 0])] * size, [[2] * size] * size
    ),
    "distributed_transpose": lambda tensor, _: distributed_transpose(tensor, 0, 1),
    "fused_all_reduce": lambda tensor, _: fused_all_reduce([tensor, torch.ones(2)])[0],
    "copy_to_parallel_region": lambda tensor, _: copy_to_parallel_region(tensor),
    "reduce_from_parallel_region": lambda tensor, _: reduce_from_parallel_region(tensor),
    "scatter_to_parallel_region": lambda tensor, _: scatter_to_parallel_region(tensor),
    "gather_from_parallel_region": lambda tensor, _: gather_from_parallel_region(tensor),
    "rfft2": lambda tensor, _: torch.view_as_real(rfft2(tensor)),
}


def awaited_in_graph(tensor):
    """What tensor parallelism hands on: a tensor that is still being computed, in the graph of another one."""
    name = "all_gather_single_autograd" if hasattr(functional, "all_gather_single") else "all_gather_tensor_autograd"
    return getattr(functional, name)(tensor, 0, dist.group.WORLD)[:4]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@ranks(2)
def test_a_tensor_that_is_still_computed_is_waited_for_and_used(rank, world_size, name):
    call = DIFFERENTIABLE[name]
    value = torch.linspace(0, 1, 16).reshape(4, 4)
    given = functional.all_reduce(value + rank, "sum", dist.group.WORLD)
    assert isinstance(given, functional.AsyncCollectiveTensor)
    expected = sum(value + one for one in range(world_size))
    torch.testing.assert_close(call(given, world_size), call(expected, world_size))
    found = []
    for make in (awaited_in_graph, lambda tensor: awaited_in_graph(tensor).clone()):
        mine = (value + rank).requires_grad_()
        result = call(make(mine.sin()), world_size)
        assert type(result) is torch.Tensor
        (result.cos() * (rank + 1)).sum().backward()
        found.append((result.detach(), mine.grad))
    torch.testing.assert_close(*found)


@ranks(2)
def test_the_output_of_tensor_parallelism_is_gathered():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    inputs = torch.randn(3, 4)
    expected = layer(inputs)
    mesh = DistributedManager().initialize_mesh((2,), ("tensor",))
    split = parallelize_module(layer, mesh, ColwiseParallel())
    torch.testing.assert_close(all_gather_v(split(inputs), dim=1), expected)
    with pytest.raises(TypeError, match=r"^tensor must be one rank's own, got a DTensor.* full_tensor\(\) returns\.$"):
        all_gather_v(distribute_tensor(inputs, mesh))
    assert aggregate_loss(split(inputs).sum()) == pytest.approx(expected.sum().item() / 2, abs=1e-5)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@ranks(2)
def test_a_tensor_with_no_more_than_attributes_travels_as_one_of_torch(rank, world_size, name):
    call = DIFFERENTIABLE[name]
    value = torch.linspace(0, 1, 16).reshape(4, 4) + rank
    mine, other = value.clone().requires_grad_(), value.clone().requires_grad_()
    result, plain = call(mine.as_subclass(Named), world_size), call(other, world_size)
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, plain)
    result.sum().backward()
    plain.sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)


@ranks(2)
def test_zeros_without_memory_travel_as_zeros():
    zeros = torch._efficientzerotensor(3)
    assert all_gather_v(zeros).tolist() == [0] * 6
    assert fused_all_reduce([zeros, torch.ones(3)])[1].tolist() == [2] * 3
    mine = torch.ones(3, requires_grad=True)
    all_gather_v(mine, [3, 3]).backward(torch._efficientzerotensor(6))
    assert mine.grad.tolist() == [0] * 3


GRADIENTS = {
    "all_gather_v": lambda mine: all_gather_v(mine, [4, 4]),
    "gather_v": lambda mine: gather_v(mine, [4, 4]),
    "reduce_scatter_v": lambda mine: reduce_scatter_v(mine, [2, 2]),
    "all_to_all_v": lambda mine: all_to_all_v(mine, [[2, 2]] * 2),
    "fused_all_reduce": fused_all_reduce,
    "copy_to_parallel_region": copy_to_parallel_region,
    "scatter_to_parallel_region": scatter_to_parallel_region,
    "rfft2": lambda mine: torch.view_as_real(rfft2(mine)),
}


@pytest.mark.parametrize("name", GRADIENTS)
@ranks(2, manager=False)
def test_a_gradient_that_cannot_travel_is_refused_on_both_ranks(monkeypatch, rank, name):
    watch(monkeypatch)
    for who in (0, 1):
        mine = torch.ones(4, 4, requires_grad=True)
        result = GRADIENTS[name](mine)
        ones = torch.ones_like(result)
        if rank == who:
            with pytest.raises((TypeError, ValueError), match=r"^gradient.* must be .*, got a batch of gradients"):
                torch.autograd.grad(result, mine, torch.stack([ones, ones]), is_grads_batched=True)
        else:
            with pytest.raises(PlanMismatchError, match=rf"rank {who} at .*batch of gradients"):
                torch.autograd.grad(result, mine, ones)
        assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@pytest.mark.parametrize("call", [all_gather_v, gather_v, fused_all_reduce, copy_to_parallel_region])
def test_a_gradient_that_cannot_travel_is_refused_on_one_process_too(call):
    DistributedManager.initialize(device="cpu")
    try:
        mine = torch.ones(4, requires_grad=True)
        with pytest.raises(ValueError, match=r"^gradient.* must be dense.*, got a batch of gradients"):
            torch.autograd.grad(call(mine), mine, torch.ones(2, 4), is_grads_batched=True)
    finally:
        DistributedManager.cleanup()


@ranks(2, manager=False)
def test_a_gradient_of_a_marked_module_that_cannot_travel_is_refused_on_both_ranks(monkeypatch, rank):
    watch(monkeypatch)
    layer = mark_module_as_shared(torch.nn.Linear(4, 4, bias=False))
    result = layer(torch.ones(4, 4))
    ones = torch.ones_like(result)
    error = ValueError if rank == 0 else PlanMismatchError
    given = torch.stack([ones, ones]) if rank == 0 else ones
    with pytest.raises(error, match="batch of gradients"):
        torch.autograd.grad(result, layer.weight, given, is_grads_batched=rank == 0)
    assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@ranks(3, manager=False)
def test_ranks_that_refuse_at_once_raise_each_its_own_error(monkeypatch, rank):
    watch(monkeypatch)
    for name in ("all_to_all_v", "all_gather_v of sizes", "all_gather_v", "fused_all_reduce", "reduce_loss"):
        for refusing in ([0, 1], [0, 1, 2], [0, 2]):
            given = torch.ones(4, 4, device="meta" if rank in refusing else "cpu")
            given = given[:1, :1] if name == "reduce_loss" else given
            with pytest.raises(ValueError if rank in refusing else PlanMismatchError, match="on the meta device"):
                CALLS[name](given, 3, 0)
            assert all_gather_objects(rank) == [0, 1, 2]


@ranks(2, manager=False)
def test_debug_mode_shows_what_was_refused(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    DistributedManager.initialize(timeout=60)
    for name in ("all_to_all_v", "all_gather_v", "fused_all_reduce", "scatter_v", "reduce_loss", "indices"):
        given = torch.ones(1, 1) if name == "reduce_loss" else torch.ones(4, 4)
        give = KINDS["within grad"] if rank == 0 else lambda call, tensor: call(tensor)
        error, text = (TypeError, "^") if rank == 0 else (PlanMismatchError, "refus(ed|al) ")
        with pytest.raises(error, match=rf"{text}\w.* must be the program's own"):
            give(lambda one, name=name: CALLS[name](one, 2, 0), given)
        assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@ranks(1, 2)
def test_objects_and_numbers_travel_within_traces_and_transforms(rank, world_size):
    found = []

    def function(tensor):
        found.append((all_gather_objects(rank), broadcast_data("a"), aggregate_loss(1.0 + rank)))
        return tensor.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    make_fx(function)(torch.ones(2))
    with FakeTensorMode():
        function(torch.ones(2))
    assert found == [([*range(world_size)], "a", (1 + world_size) / 2)] * 4


def test_a_device_that_a_group_does_not_reach():
    DistributedManager.initialize()
    try:
        group = dataclasses.replace(DistributedManager().resolve_group(None), device_types=("cuda",))
        with pytest.raises(ValueError, match=r"^x must be on a device that group 'world' can reach \(cuda\), got cpu"):
            carried(torch.ones(2), group, "x")
    finally:
        DistributedManager.cleanup()
