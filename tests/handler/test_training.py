import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.data import distributed_loader
from distman.errors import DistmanError, NonFiniteLossError
from distman.handler import Callback, NNHandler
from distman.testing import ranks

from .problems import GLOBAL_BATCH, Network, Normed, make_handler, reference, regression


def assert_same_on_all_ranks(module):
    weights = [parameter.detach() for parameter in module.parameters()]
    for other in all_gather_objects(weights):
        assert all(torch.equal(one, two) for one, two in zip(weights, other, strict=True))


@ranks(1, 2, 4)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_any_number_of_ranks_learns_what_one_process_learns(accumulate, dtype, tolerance, world_size):
    handler = make_handler(GLOBAL_BATCH // world_size, dtype=dtype)
    losses, weights = reference(4, accumulate=accumulate, dtype=dtype)
    history = handler.train(4, accumulate=accumulate)
    assert history["loss"] == pytest.approx(losses, rel=tolerance)
    assert history["epoch"] == [0, 1, 2, 3]
    assert handler.num_steps == 4 * -(-65 // (GLOBAL_BATCH * accumulate))
    for own, expected in zip(handler.module.parameters(), weights, strict=True):
        torch.testing.assert_close(own.detach(), expected, rtol=100 * tolerance, atol=tolerance)
    assert_same_on_all_ranks(handler.module)


@ranks(1, 3)
def test_the_gradient_is_clipped_as_that_of_the_whole_batch(world_size):
    handler = make_handler(GLOBAL_BATCH // world_size, data=regression())
    if world_size == 1:
        assert handler.train(3, clip_norm=0.1)["loss"] == pytest.approx(reference(3, clip_norm=0.1)[0], rel=1e-10)
    else:
        handler.train(3, clip_norm=0.1)
        assert_same_on_all_ranks(handler.module)
        assert handler.history["loss"][-1] < handler.history["loss"][0]


class Stream:
    """Batches that each rank finds in its own way: 3 on rank 0, 4 on rank 1, none on the others."""

    def __init__(self, rank):
        inputs, targets = regression().tensors
        self.batches = [
            [(inputs[:16], targets[:16]), (inputs[16:32], targets[16:32]), (inputs[32:37], targets[32:37])],
            [(inputs[start : start + 7], targets[start : start + 7]) for start in range(37, 65, 7)],
            [],
        ][min(rank, 2)]

    def __iter__(self):
        return iter(self.batches)


@ranks(2, 3)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_with_other_numbers_of_batches_lose_no_sample(accumulate, rank):
    handler = make_handler(1)
    handler.set_train_loader(Stream(rank))
    history = handler.train(2, accumulate=accumulate)
    assert handler.num_steps == 2 * -(-4 // accumulate)
    inputs, targets = regression().tensors
    fresh = make_handler(1)
    steps = [
        torch.cat([torch.arange(0, 16), torch.arange(37, 44)]),
        torch.cat([torch.arange(16, 32), torch.arange(44, 51)]),
        torch.cat([torch.arange(32, 37), torch.arange(51, 58)]),
        torch.arange(58, 65),
    ]
    windows = [torch.cat(steps[start : start + accumulate]) for start in range(0, 4, accumulate)]
    expected = []
    for _ in range(2):
        total = 0.0
        for window in windows:
            loss = nn.functional.mse_loss(fresh.module(inputs[window]), targets[window])
            fresh.optimizer.zero_grad()
            loss.backward()
            fresh.optimizer.step()
            total += loss.item() * len(window)
        expected.append(total / 65)
    assert history["loss"] == pytest.approx(expected, rel=1e-10)
    assert_same_on_all_ranks(handler.module)


class Poisoned(nn.Module):
    """A loss that is NaN on some ranks in one step."""

    def __init__(self, ranks, step, value=float("nan")):
        super().__init__()
        self.ranks, self.step, self.value, self.num_calls = ranks, step, value, 0

    def forward(self, outputs, targets):
        self.num_calls += 1
        loss = nn.functional.mse_loss(outputs, targets)
        is_bad = self.num_calls == self.step and DistributedManager().rank in self.ranks
        return loss * 0 + self.value if is_bad else loss


@ranks(1, 4)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_at_the_same_step(value, clip_norm, world_size):
    bad = min(2, world_size - 1)
    handler = make_handler(4)
    handler.set_loss_fn(Poisoned([bad], 3, value))
    with pytest.raises(NonFiniteLossError, match=rf"must be finite in step 2, got {value} on rank {bad} \(.*, pid "):
        handler.train(2, clip_norm=clip_norm)
    assert handler.num_steps == 2
    assert all(parameter.isfinite().all() for parameter in handler.module.parameters())
    assert_same_on_all_ranks(handler.module)
    handler.set_loss_fn(nn.functional.mse_loss)
    assert all(loss == loss for loss in handler.train(2)["loss"])


@ranks(1, 4)
@pytest.mark.parametrize("amp", [None, "fp16"])
def test_a_step_with_such_a_loss_can_be_left_out_on_all_ranks(amp, world_size):
    handler = make_handler(GLOBAL_BATCH // world_size, dtype=torch.float32)
    handler.set_loss_fn(Poisoned([min(2, world_size - 1)], 2))
    handler.train(2, non_finite="skip", amp=amp)
    assert handler.history["skipped"][0] >= 1  # in half precision, maybe some of whose scale was too large
    assert handler.history["skipped"] == [1, 0] or amp
    assert handler.num_steps + sum(handler.history["skipped"]) == 2 * 5
    assert all(loss == loss for loss in handler.history["loss"])
    assert_same_on_all_ranks(handler.module)


@ranks(2)
def test_a_gradient_that_is_not_finite_is_told_from_a_loss():
    handler = make_handler(8)
    handler.set_loss_fn(lambda outputs, targets: nn.functional.mse_loss(outputs, targets) + (outputs * 0).sqrt().sum())
    with pytest.raises(NonFiniteLossError, match="got a gradient that is not, with finite losses on all ranks"):
        handler.train(1)


@ranks(1, 2)
def test_mixed_precision_learns_and_an_overflow_only_lowers_the_scale(world_size):
    for amp in ("bf16", "fp16"):
        handler = make_handler(GLOBAL_BATCH // world_size, dtype=torch.float32)
        losses = handler.train(20, amp=amp, clip_norm=10.0)["loss"]
        assert losses[-1] < 0.6 * losses[0]
        assert_same_on_all_ranks(handler.module)
        assert handler.predict(regression(torch.float32), all_ranks=True).shape == (65, 1)


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


@ranks(1, 2)
def test_schedulers_step_with_steps_or_epochs(world_size):
    for per, expected in (("step", 0.9**10), ("epoch", 0.9**2)):
        handler = make_handler(GLOBAL_BATCH // world_size, lr=0.1)
        handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9, per=per)
        handler.train(2)
        assert handler.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * expected)
    handler.set_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e6)
    with pytest.raises(
        DistmanError, match="ReduceLROnPlateau monitors val_loss, but there are no data to validate with"
    ):
        handler.train(4)
    handler.set_val_loader(regression(), batch_size=8)
    handler.train(6, validate_every=2)
    assert handler.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**2 * 0.01)
    with pytest.raises(ValueError, match="per must be 'epoch' for ReduceLROnPlateau"):
        handler.set_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, per="step")


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


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 1, dtype=torch.float64)
        self.unused = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, inputs):
        return self.used(inputs)


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


class HalfFrozen(Network):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(requires_grad=False)


@ranks(2)
def test_a_model_without_trainable_parameters_is_rank_zeros(rank):
    torch.manual_seed(rank)
    handler = NNHandler(lambda: nn.Linear(2, 2).requires_grad_(requires_grad=False))
    assert_same_on_all_ranks(handler.module)


@ranks(2)
def test_a_scale_that_is_too_large_is_no_step_and_one_that_cannot_help_is_an_error():
    handler = make_handler(8, dtype=torch.float32)
    handler.set_loss_fn(lambda outputs, targets: nn.functional.mse_loss(outputs, targets) * 1e35)
    handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5, per="step")
    handler.train(1, amp="fp16")
    assert (handler.num_steps, handler.history["skipped"]) == (0, [5])
    assert handler.optimizer.param_groups[0]["lr"] == 0.02
    handler.set_loss_fn(lambda outputs, targets: nn.functional.mse_loss(outputs, targets) + (outputs * 0).sqrt().sum())
    with pytest.raises(NonFiniteLossError, match="got a gradient that is not, with finite losses on all ranks"):
        handler.train(10, amp="fp16")


@ranks(2)
def test_a_step_that_is_left_out_leaves_no_trace_in_buffers():
    inputs, targets = regression().tensors
    inputs = inputs.clone()
    inputs[5] = float("nan")
    handler = NNHandler(Normed, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.01)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(TensorDataset(inputs, targets), batch_size=8, drop_last=True)
    handler.set_val_loader(regression(), batch_size=8)
    handler.train(2, non_finite="skip")
    assert handler.history["skipped"] == [1, 1]
    assert all(loss == loss for loss in handler.val_losses)


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


@ranks(1, 2)
@pytest.mark.parametrize("cached", [False, True])
def test_fewer_samples_than_ranks_and_batches_of_any_structure(cached):
    data = [{"x": torch.ones(4, dtype=torch.float64), "y": 2.0}]
    handler = NNHandler(Network, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(
        lambda outputs, targets: (outputs[:, 0] - targets).square().mean(),
        forward=lambda model, batch: (model(batch["x"]), batch["y"]),
    )
    handler.set_train_loader(data, batch_size=4, cached=cached)
    handler.set_val_loader(data, batch_size=4, cached=cached)
    handler.train(30)
    assert handler.history["val_loss"][-1] < 1e-3
    assert_same_on_all_ranks(handler.module)
    assert float(handler.predict(data, all_ranks=True)) == pytest.approx(2.0, abs=0.05)


@ranks(2)
def test_what_is_missing_or_wrong_is_one_sentence():
    handler = NNHandler(Network)
    with pytest.raises(
        DistmanError, match=r"the handler has no loss function. Call set_loss_fn\(\) or set_sde\(\) first"
    ):
        handler.train(1)
    handler.set_loss_fn(nn.functional.mse_loss)
    with pytest.raises(DistmanError, match=r"the handler has no optimizer. Call set_optimizer\(\)"):
        handler.train(1)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(DistmanError, match=r"the handler has no data to train with. Call set_train_loader"):
        handler.train(1)
    with pytest.raises(DistmanError, match=r"the handler has no data to validate with. Call set_val_loader"):
        handler.validate()
    with pytest.raises(DistmanError, match="the handler has no equation of a score-based model"):
        handler.sample((2, 3))
    handler.set_train_loader(regression(), batch_size=8)
    for options, message in (
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"amp": "fp8"}, "amp must be 'bf16', 'fp16' or None, got 'fp8'"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0"),
        ({"ema_decay": 1.0}, "ema_decay must lie between 0 and 1"),
        ({"non_finite": "ignore"}, "non_finite must be 'raise' or 'skip'"),
        ({"validate_every": 0}, "validate_every must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            handler.train(1, **options)
    handler.set_train_loader(Empty())
    with pytest.raises(ValueError, match="no rank has a batch to train with in epoch 0"):
        handler.train(1)
    for set_loader in (handler.set_train_loader, handler.set_val_loader):
        with pytest.raises(TypeError, match="data must be re-iterable, once per epoch, got the iterator"):
            set_loader(iter([]))
        with pytest.raises(TypeError, match="group must be left out"):
            set_loader(regression(), group="world")
    with pytest.raises(TypeError, match="data to validate with must be read in order, got a TrainingLoader"):
        handler.set_val_loader(distributed_loader(regression()))
    with pytest.raises(TypeError, match=r"loader options must be passed with a dataset, got \['batch_size'\]"):
        handler.set_train_loader(Empty(), batch_size=3)
    handler.set_train_loader(regression(), batch_size=64, drop_last=True)
    with pytest.raises(ValueError, match="a loader to train with must have a full batch, got none"):
        handler.train(1)
    with pytest.raises(ValueError, match="use_distributed must be True, as the manager was initialized, got False"):
        NNHandler(Network, use_distributed=False)
    handler.set_loss_fn(lambda outputs, targets: (outputs - targets).square())
    handler.set_train_loader(regression(), batch_size=8)
    with pytest.raises(ValueError, match=r"the loss must be one number, got shape \(8, 1\)"):
        handler.train(1)


class Empty:
    def __iter__(self):
        return iter(())


class Recorder(Callback):
    """Keeps the weights after each step."""

    def __init__(self, weights):
        self.weights = weights

    def on_step_end(self, handler, step):
        assert step == len(self.weights) + 1
        self.weights.append([parameter.detach().clone() for parameter in handler.module.parameters()])


class CallsTheWrappedModel(Callback):
    def on_epoch_begin(self, handler, epoch):
        handler.model(torch.zeros(2 + epoch, 4, dtype=torch.float64))


@pytest.fixture
def nobody():
    """A process without a manager, before and after."""
    DistributedManager.cleanup()
    yield
    DistributedManager.cleanup()


@pytest.mark.usefixtures("nobody")
def test_it_initializes_the_manager_if_nobody_has():
    handler = NNHandler(nn.Linear, in_features=2, out_features=1)
    assert DistributedManager.is_initialized()
    assert handler.model is handler.module
    handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda model: [model.weight])
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(TensorDataset(torch.ones(3, 2), torch.ones(3, 1)), batch_size=2)
    bias = handler.module.bias.detach().clone()
    handler.train(1)
    assert torch.equal(handler.module.bias, bias)


def made(what):
    return f"must be a class or function that makes the {what}, got "


@ranks(1)
def test_what_was_made_already_is_refused():
    with pytest.raises(
        TypeError, match=f"model_class {made('module')}a Linear. Pass the class and its arguments, or lam"
    ):
        NNHandler(nn.Linear(1, 1))
    handler = NNHandler(nn.Linear, in_features=1, out_features=1)
    optimizer = torch.optim.SGD(handler.module.parameters())
    with pytest.raises(TypeError, match=f"optimizer_class {made('optimizer')}a SGD. Pass the class and its arguments"):
        handler.set_optimizer(optimizer)
    with pytest.raises(TypeError, match=f"optimizer_class {made('optimizer')}'adam'. "):
        handler.set_optimizer("adam", lr=0.1)
    handler.set_optimizer(torch.optim.SGD)
    with pytest.raises(TypeError, match=f"scheduler_class {made('scheduler')}a StepLR. "):
        handler.set_scheduler(torch.optim.lr_scheduler.StepLR(handler.optimizer, 1))


@ranks(1)
@pytest.mark.parametrize("epochs", ["3", 3.0, None])
def test_epochs_are_whole(epochs):
    with pytest.raises(TypeError, match=re.escape(f"epochs must be a whole number, got {epochs!r}. ")):
        make_handler(8).train(epochs)


@ranks(1)
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"batchsize": 2}, "batchsize=2. Did you mean batch_size?"),
        ({"num_worker": 2}, "num_worker=2. Did you mean num_workers?"),
        ({"cache": True}, "cache=True. Did you mean cached?"),
        ({"cached": True, "num_workers": 2}, "num_workers=2. It takes batch_size, cached, device, "),
    ],
    ids=str,
)
def test_a_misspelt_option_of_a_loader_is_told_with_the_method(options, hint):
    handler = NNHandler(Network)
    for method in (handler.set_train_loader, handler.set_val_loader):
        with pytest.raises(TypeError, match=re.escape(f"option that {method.__name__}() takes, got {hint}")):
            method(regression(), **options)
