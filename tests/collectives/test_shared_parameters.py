"""The mark of shared parameters: it survives what becomes of a module, and its sums have gradients."""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import attention
from torch.optim.swa_utils import AveragedModel

from distman import DistmanError, DistributedManager, NotInitializedError
from distman._base.process_state import reset
from distman.mappings import mark_module_as_shared, reduce_from_parallel_region, unmark_module_as_shared
from distman.testing import ranks
from tests.collectives.reference import random_tensor


def make_module():
    """A module whose attention uses the parameters of a child without calling it, ``out_proj``."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), layer, torch.nn.Linear(4, 2)).double()


def batch_of(rank):
    return random_tensor(2 + rank, 3, seed=rank)


def loss_of(module, rank):
    with attention.sdpa_kernel(attention.SDPBackend.MATH):  # which can be differentiated twice
        return module(batch_of(rank)).square().sum()


def gradients(module):
    return [parameter.grad.clone() for parameter in module.parameters()]


def expected_gradients(world_size):
    module = make_module()
    sum(loss_of(module, rank) for rank in range(world_size)).backward()
    return gradients(module)


def loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(module):
    module.load_state_dict(make_module().state_dict(), assign=True)
    return module


def replaced(module):
    module[2].weight = torch.nn.Parameter(module[2].weight.detach().clone())
    return module


def frozen_and_unfrozen(module):
    return module.requires_grad_(requires_grad=False).requires_grad_()


CHANGES = {
    "deepcopy": copy.deepcopy,
    "twice": lambda module: copy.deepcopy(loaded(module)),
    "torch.save": loaded,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301 - made here
    "assign": assigned,
    "replaced": replaced,
    "unfrozen": frozen_and_unfrozen,
    "to": lambda module: module.to(torch.float32).to(torch.float64),
    "average": lambda module: AveragedModel(module).module,
}


@pytest.mark.gloo_only("whether a mark finds its parameters again does not depend on the backend")
@pytest.mark.parametrize("change", CHANGES)
@ranks(2)
def test_the_mark_survives(rank, world_size, change):
    for frozen in (False, True):
        check_the_mark_after(CHANGES[change], rank, world_size, frozen=frozen)


def check_the_mark_after(change, rank, world_size, *, frozen):
    module = make_module().requires_grad_(requires_grad=not frozen)
    module = change(mark_module_as_shared(module)).requires_grad_()
    for _ in range(2):
        module.zero_grad()
        loss_of(module, rank).backward()
        torch.testing.assert_close(gradients(module), expected_gradients(world_size), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="marked as shared already"):
        mark_module_as_shared(module)
    unmark_module_as_shared(module)
    module.zero_grad()
    loss_of(module, rank).backward()
    alone = make_module()
    loss_of(alone, rank).backward()
    torch.testing.assert_close(gradients(module), gradients(alone), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_marked_first", [True, False])
@pytest.mark.parametrize("parts", ["whole", "nested"])
@ranks(2)
def test_fully_shard_before_or_after(rank, world_size, parts, is_marked_first):
    module = make_module()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    if is_marked_first:
        mark_module_as_shared(module)
    if parts == "nested":
        fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    if not is_marked_first:
        mark_module_as_shared(module)
    for _ in range(2):
        module.zero_grad()
        loss_of(module, rank).backward()  # FSDP takes the mean of what are equal sums
        found = [parameter.grad.full_tensor() for parameter in module.parameters()]
        torch.testing.assert_close(found, expected_gradients(world_size))
    unmark_module_as_shared(module)
    module.zero_grad()
    loss_of(module, rank).backward()
    found = [parameter.grad.full_tensor() * world_size for parameter in module.parameters()]
    torch.testing.assert_close(found, expected_gradients(world_size))


@ranks(2)
def test_a_parameter_that_goes_is_an_error(rank):
    module = mark_module_as_shared(make_module())
    torch.nn.utils.parametrizations.weight_norm(module[2])
    with pytest.raises(DistmanError, match=r"got ParametrizedLinear without \['weight'\]. Unmark the module before"):
        loss_of(module, rank)
    unmark_module_as_shared(module)
    mark_module_as_shared(module)
    loss_of(module, rank).backward()
    assert module[2].parametrizations.weight.original1.grad is not None


@ranks(2)
def test_swapping_the_contents_of_a_parameter_is_refused(rank):
    module = mark_module_as_shared(make_module())
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(module[2].weight, torch.nn.Parameter(torch.zeros(2, 2).double()))
    loss_of(module, rank).backward()
    torch.testing.assert_close(gradients(module), expected_gradients(2))


@ranks(2)
def test_a_dtensor_is_refused_where_it_is_used(rank):
    layer = mark_module_as_shared(torch.nn.Linear(2, 2))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for name, parameter in list(layer.named_parameters()):
        whole = torch.distributed.tensor.distribute_tensor(parameter.detach(), mesh)
        setattr(layer, name, torch.nn.Parameter(whole))
    with pytest.raises(TypeError, match="got a DTensor in Linear"):
        layer(torch.ones(1, 2))
    assert rank < 2


@ranks(2)
def test_groups_with_and_without_a_name(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    again = loaded(mark_module_as_shared(make_module(), "pairs"))
    loss_of(again, rank).backward()
    torch.testing.assert_close(gradients(again), expected_gradients(2))
    foreign = mark_module_as_shared(make_module(), dist.new_group([0, 1]))
    with pytest.raises(DistmanError, match="shared over a group that has a name"):
        loaded(foreign)
    copied = copy.deepcopy(foreign)
    loss_of(copied, rank).backward()
    torch.testing.assert_close(gradients(copied), expected_gradients(2))


@ranks(2, manager=False)
def test_a_later_job_sums_over_the_group_of_that_name_or_raises(rank, world_size):
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("alone", 1)
    module = mark_module_as_shared(make_module(), "alone")
    saved = pickle.dumps(module)
    loss = loss_of(module, rank)
    reset()
    with pytest.raises(NotInitializedError):
        loss.backward()
    DistributedManager.initialize()
    with pytest.raises(DistmanError, match="'alone' must be"):
        loss_of(pickle.loads(saved), rank).backward()  # noqa: S301 - made here
    with torch.no_grad():
        loss_of(module, rank)
    DistributedManager.create_process_subgroup("alone", 2)
    module.zero_grad()
    loss_of(module, rank).backward()
    torch.testing.assert_close(gradients(module), expected_gradients(world_size))


@ranks(1, 2, 3)
def test_a_gradient_penalty_has_the_gradient_of_one_process(rank, world_size):
    """The losses of all ranks are added up: each loss holds a penalty on the gradients of that sum."""

    def penalty(grads, one):
        return sum(((one + 1) * grad.tanh()).square().sum() for grad in grads)

    module = mark_module_as_shared(make_module())
    grads = torch.autograd.grad(loss_of(module, rank), list(module.parameters()), create_graph=True)
    (loss_of(module, rank) + penalty(grads, rank)).backward()

    reference = make_module()
    total = sum(loss_of(reference, one) for one in range(world_size))
    grads = torch.autograd.grad(total, list(reference.parameters()), create_graph=True)
    (total + sum(penalty(grads, one) for one in range(world_size))).backward()
    torch.testing.assert_close(gradients(module), gradients(reference))


@ranks(2)
def test_a_step_within_a_step_has_the_gradient_of_one_process(rank, world_size):
    """A learned start: each rank's loss after a step along the summed gradient."""

    def after_a_step(module, grads, one):
        moved = {name: p - 0.1 * g for (name, p), g in zip(module.named_parameters(), grads, strict=True)}
        return loss_of(functools.partial(torch.func.functional_call, module, moved), one)

    module = mark_module_as_shared(make_module())
    parameters = list(module.parameters())
    grads = torch.autograd.grad(loss_of(module, rank), parameters, create_graph=True)
    after_a_step(module, grads, rank).backward()

    reference = make_module()
    total = sum(loss_of(reference, one) for one in range(world_size))
    grads = torch.autograd.grad(total, list(reference.parameters()), create_graph=True)
    sum(after_a_step(reference, grads, one) for one in range(world_size)).backward()
    torch.testing.assert_close(gradients(module), gradients(reference))


@pytest.mark.gloo_only("what a graph leaves out does not depend on the backend")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(2)
def test_a_marked_module_can_be_compiled(rank, world_size):
    torch.compiler.reset()  # what other tests have compiled in this process counts as compiled again
    module = mark_module_as_shared(make_module())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss_of(compiled, rank).backward()
    torch.testing.assert_close(gradients(module), expected_gradients(world_size))
    copied = copy.deepcopy(module)
    copied.zero_grad()
    loss_of(torch.compile(copied, backend="aot_eager"), rank).backward()
    torch.testing.assert_close(gradients(copied), expected_gradients(world_size))


@ranks(1, 3)
def test_the_sum_of_every_dtype(rank, world_size):
    for dtype in (torch.int16, torch.bool, torch.int8, torch.float16, torch.complex64):
        terms = [random_tensor(3, 2, dtype=dtype, seed=one) for one in range(world_size)]
        expected = torch.stack(terms).any(0) if dtype == torch.bool else torch.stack(terms).sum(0, dtype=dtype)
        torch.testing.assert_close(reduce_from_parallel_region(terms[rank]), expected)
