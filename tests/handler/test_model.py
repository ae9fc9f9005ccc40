import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distman import DistributedManager
from distman.collectives import broadcast_data
from distman.errors import DistmanError
from distman.handler import Callback, NNHandler
from distman.testing import ranks

from .problems import Network, Normed, assert_same_on_all_ranks, make_handler, reference, regression


class Recorder(Callback):
    """Keeps the weights after each step."""

    def __init__(self, weights):
        self.weights = weights

    def on_step_end(self, handler, step):
        assert step == len(self.weights) + 1
        self.weights.append([parameter.detach().clone() for parameter in handler.module.parameters()])


@ranks(2)
def test_the_average_of_the_weights_is_what_is_evaluated():
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    weights = []
    handler.add_callback(Recorder(weights))
    handler.train(2, ema_decay=0.5)
    expected = weights[0]
    for one in weights[1:]:
        expected = [0.5 * average + 0.5 * own for average, own in zip(expected, one, strict=True)]
    for own, average in zip(handler.ema_module.parameters(), expected, strict=True):
        torch.testing.assert_close(own.detach(), average, rtol=1e-12, atol=0)
    with torch.no_grad():
        inputs, targets = regression().tensors
        loss = nn.functional.mse_loss(handler.ema_module(inputs), targets).item()
    assert handler.history["val_loss"][-1] == pytest.approx(loss, rel=1e-12)
    assert handler.validate()["loss"] == pytest.approx(loss, rel=1e-12)
    handler.train(3)
    assert handler.ema_module is None


class CallsTheWrappedModel(Callback):
    def on_epoch_begin(self, handler, epoch):
        handler.model(torch.zeros(2 + epoch, 4, dtype=torch.float64))


@ranks(2)
def test_the_wrapped_model_is_refused_outside_of_a_step(rank):
    handler = make_handler(4)
    assert isinstance(handler.model, DistributedDataParallel)
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    if rank == 0:
        with pytest.raises(DistmanError, match=r"must be called within a training step.*handler\.module"):
            handler.model(inputs)
        assert handler(inputs).shape == handler.module(inputs).shape == (2, 1)
    handler.add_callback(CallsTheWrappedModel())
    with pytest.raises(DistmanError, match="must be called within a training step"):
        handler.train(1)


class HalfFrozen(Network):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(requires_grad=False)


@ranks(2)
def test_parameters_that_are_trained_from_later_on_are_those_of_all_ranks():
    handler = NNHandler(HalfFrozen, seed=0)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=8)
    handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda model: model.second.parameters())
    first = handler.train(2)["loss"]
    handler.module.first.requires_grad_()
    handler.set_optimizer(torch.optim.Adam, lr=0.01)
    assert handler.train(4)["loss"][-1] < first[-1]
    assert handler.optimizer.param_groups[0]["lr"] == 0.01
    assert_same_on_all_ranks(handler.module)
    stray = nn.Parameter(torch.zeros(1))
    handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda model: [*model.parameters(), stray])
    with pytest.raises(ValueError, match="parameters of the optimizer must be the model's, got 1 others"):
        handler.train(5)


@ranks(2)
def test_a_model_without_trainable_parameters_is_rank_zeros(rank):
    torch.manual_seed(rank)
    handler = NNHandler(lambda: nn.Linear(2, 2).requires_grad_(requires_grad=False))
    assert_same_on_all_ranks(handler.module)


@ranks(1)
def test_parts_that_are_frozen_by_their_mode_stay_so():
    handler = NNHandler(Normed, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.01)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=8, drop_last=True)
    handler.set_val_loader(regression(), batch_size=8)
    handler.module.norm.eval()
    handler.train(2)
    assert torch.equal(handler.module.norm.running_mean, torch.zeros(4, dtype=torch.float64))
    handler.module.eval()
    handler.train(3)
    assert handler.module.training


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 1, dtype=torch.float64)
        self.unused = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, inputs):
        return self.used(inputs)


@ranks(2)
def test_unused_parameters_train_where_the_variable_says_so():
    DistributedManager().find_unused_parameters = True
    handler = NNHandler(Frozen, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=8)
    handler.train(2)
    assert handler.history["loss"][1] < handler.history["loss"][0]


@ranks(2)
def test_a_compiled_model_keeps_its_names():
    handler = make_handler(8, compile={"backend": "eager"})
    losses = handler.train(2)["loss"]
    assert losses == pytest.approx(reference(2)[0], rel=1e-9)
    assert "first.weight" in handler.state_dict()["model"]["module"]


class OfAllKinds(nn.Module):
    """A model with what is no weight: statistics, a table, a counter, the vectors of a spectral norm, a scale."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(6, momentum=0.3, dtype=torch.float64)
        self.second = nn.utils.spectral_norm(nn.Linear(6, 1, dtype=torch.float64))
        self.register_buffer("table", torch.arange(49))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, inputs):
        if self.training:
            self.scale.mul_(1.01)
        return self.second(self.norm(self.first(inputs))) * self.scale


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("use_buffers", [None, True, False])
def test_parameters_and_statistics_are_averaged_and_the_rest_is_copied(use_buffers, strategy, tmp_path):
    handler = NNHandler(OfAllKinds, seed=3, strategy=strategy)
    handler.set_optimizer(torch.optim.SGD, lr=0.05)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(num_samples=64), batch_size=8)
    handler.set_val_loader(regression(), batch_size=8)
    states = KeepsStates()
    handler.add_callback(states)
    handler.train(2, ema_decay=0.9, use_buffers=use_buffers)
    handler.export(tmp_path / "average.pt")
    average = torch.load(tmp_path / "average.pt")
    weights = {name for name, _ in OfAllKinds().named_parameters()}
    statistics = {"norm.running_mean", "norm.running_var"}
    for name, found in average.items():
        values = [state[name] for state in states.found]
        is_averaged = name in weights or (name in statistics and use_buffers is not False) or bool(use_buffers)
        expected = values[0]
        for value in values[1:]:
            expected = 0.9 * expected + 0.1 * value if is_averaged and value.is_floating_point() else value
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    evaluated = OfAllKinds()
    evaluated.load_state_dict(average)
    inputs, targets = regression().tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(evaluated.eval()(inputs), targets).item()
    assert handler.history["val_loss"][-1] == pytest.approx(loss, rel=1e-9)


class KeepsStates(Callback):
    """Keeps the whole state after each step, that of rank 0 on all ranks."""

    def __init__(self):
        self.found = []

    def on_step_end(self, handler, step):
        state = {name: whole(value) for name, value in handler.module.state_dict().items()}
        self.found.append(broadcast_data(state))


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


class UsesAPart(Network):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


@ranks(2)
def test_parameters_without_a_gradient_are_named():
    handler = NNHandler(UsesAPart)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=8)
    with pytest.raises(DistmanError, match=r"got none for unused\.weight, unused\.bias in the step before. Freeze"):
        handler.train(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@ranks(2)
def test_a_handler_that_predicts_computes_no_gradient(mode):
    calls = []

    class Hooked(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.weight.register_hook(calls.append)

    with mode():
        outputs = NNHandler(nn.Linear, in_features=1, out_features=1).predict(torch.ones(4, 1), all_ranks=True)
        assert outputs.shape == (4, 1)
    NNHandler(Hooked).predict(torch.ones(4, 1))
    assert not calls


def test_a_handler_that_has_trained_is_pickled_and_copied():
    handler = make_handler(8)
    handler.add_callback(Recorder([]))
    handler.train(1)
    expected = handler.predict(regression().tensors[0])
    for other in (pickle.loads(pickle.dumps(handler)), copy.deepcopy(handler)):  # noqa: S301 - made here
        assert torch.equal(other.predict(regression().tensors[0]), expected)
        other.train(2)
        assert len(other.history["loss"]) == 2


@ranks(1, 2)
@pytest.mark.parametrize("trains", [False, True])
def test_a_handler_is_freed_with_its_last_reference(trains, world_size):
    """And with it the workers of a loader, which wait for seconds where they are found in a cycle of references."""
    handler = make_handler(8)
    handler.add_callback(Recorder([]))
    handler.predict(regression().tensors[0])
    if trains:
        handler.train(1)
    is_wrapped = world_size > 1  # DistributedDataParallel keeps the module in cycles of its own
    module = weakref.ref(handler if is_wrapped else handler.module)
    gc.collect()
    gc.disable()
    try:
        del handler
        assert module() is None
    finally:
        gc.enable()
