import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.errors import NonFiniteLossError
from distman.handler import NNHandler
from distman.testing import ranks

from .problems import GLOBAL_BATCH, Network, Normed, assert_same_on_all_ranks, make_handler, reference, regression


@ranks(1, 3)
def test_the_gradient_is_clipped_as_that_of_the_whole_batch(world_size):
    handler = make_handler(GLOBAL_BATCH // world_size, data=regression())
    if world_size == 1:
        assert handler.train(3, clip_norm=0.1)["loss"] == pytest.approx(reference(3, clip_norm=0.1)[0], rel=1e-10)
    else:
        handler.train(3, clip_norm=0.1)
        assert_same_on_all_ranks(handler.module)
        assert handler.history["loss"][-1] < handler.history["loss"][0]


@ranks(1, 2)
def test_parameters_that_are_not_optimized_gather_no_gradient():
    handler = make_handler(8)
    handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda module: module.second.parameters())
    handler.train(1)
    assert all(parameter.grad is None for parameter in handler.module.parameters())


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


@ranks(1, 3)
@pytest.mark.parametrize(("value", "clip_norm"), [(float("nan"), None), (float("inf"), 1.0)])
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


@ranks(1, 2)
def test_a_look_some_steps_later_names_the_step_and_lets_nobody_save_what_it_spoilt(world_size, tmp_path):
    bad = world_size - 1
    handler = make_handler(GLOBAL_BATCH // world_size)  # five steps in an epoch
    path = tmp_path / "first.pt"
    handler.train(1, check_every=4)
    handler.save(path)
    weights = [parameter.clone() for parameter in handler.module.parameters()]

    def spoilt_by(step, taken, **options):
        handler.load(path)
        handler.set_loss_fn(Poisoned([bad], step - 4))
        told = rf"must be finite in step {step}, got nan on rank {bad} \(.*\. {taken} steps were taken before"
        with pytest.raises(NonFiniteLossError, match=told):
            handler.train(2, **options)
        for forbidden in (lambda: handler.save(path), lambda: handler.train(2)):
            with pytest.raises(NonFiniteLossError, match=told):
                forbidden()

    spoilt_by(6, 2, check_every=4)  # seen before step 8 is taken
    spoilt_by(6, 4, check_every=100)  # at the end of the epoch
    folder = tmp_path / "saved"
    handler.auto_save(folder, every_steps=7, resume=False)
    spoilt_by(6, 1, check_every=100)  # before a checkpoint
    assert not [*folder.glob("*/*")]
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.load(path)
    assert all(map(torch.equal, handler.module.parameters(), weights))
    assert all(loss == loss for loss in handler.train(2, check_every=4)["loss"])


@ranks(1, 3)
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


def mean_where_seen(outputs, targets):
    """Return a mean squared error over what is seen, which is 0 by 0 where nothing is."""
    is_seen = ~targets.isnan()
    return ((outputs - targets.nan_to_num()).square() * is_seen).sum() / is_seen.sum()


@ranks(3)
@pytest.mark.parametrize(("kind", "accumulate"), [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("own step", 1), ("closure", 2)])
def test_a_mean_over_no_samples_counts_nothing(kind, accumulate, world_size):
    """Nothing is seen in whole batches on some ranks, and in one step on all of them."""
    inputs, targets = regression(num_samples=24).tensors
    targets[torch.tensor([1, 2, 3, 6, 7, 8, 9, 10, 11, 16, 17])] = torch.nan
    optimizer = functools.partial(torch.optim.LBFGS, max_iter=3) if kind == "closure" else torch.optim.SGD

    def step(stepper, batch):
        def closure():
            loss = mean_where_seen(stepper.module(batch[0]), batch[1])
            stepper.backward(loss)
            return loss

        if kind == "closure":
            stepper.step(closure=closure)
        else:
            closure()
            stepper.step()

    handler = NNHandler(Network, seed=1, strategy="fsdp" if kind == "fsdp" else "ddp")
    plain = copy.deepcopy(make_handler(8).module)
    handler.set_optimizer(optimizer, lr=0.1)
    handler.set_loss_fn(mean_where_seen, num_samples=lambda batch: int((~batch[1].isnan()).sum()))
    if kind in ("own step", "closure"):
        handler.set_step(step)
    handler.set_train_loader(TensorDataset(inputs, targets), batch_size=6 // world_size, shuffle=False)
    handler.train(2, accumulate=accumulate)
    assert handler.num_steps == 2 * 4 // accumulate
    stepped = optimizer(plain.parameters(), lr=0.1)
    for rows in [*torch.arange(24).split(6 * accumulate)] * 2:

        def closure(rows=rows):
            stepped.zero_grad()
            loss = mean_where_seen(plain(inputs[rows]), targets[rows])
            loss.backward()
            return loss

        if not targets[rows].isnan().all():
            stepped.step(closure)
    expected = plain(inputs).detach()
    torch.testing.assert_close(handler.predict(inputs, all_ranks=True), expected, rtol=1e-9, atol=1e-9)


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
@pytest.mark.parametrize("amp", [None, "bf16", "fp16"])
def test_an_optimizer_of_a_frozen_part_takes_no_part(amp):
    handler = NNHandler(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), seed=0, logger_mode=None)
    for name, part in (("first", 0), ("second", 1)):
        handler.set_optimizer(
            torch.optim.SGD, lr=0.1, name=name, parameters=lambda model, at=part: model[at].parameters()
        )
    handler.module[1].requires_grad_(requires_grad=False)
    frozen, free = (handler.module[at].weight.detach().clone() for at in (1, 0))
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), batch_size=2)
    handler.train(1, amp=amp)
    assert torch.equal(handler.module[1].weight, frozen)
    assert not torch.equal(handler.module[0].weight, free)


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
    assert all(loss == loss for loss in handler.history["val_loss"])


class Embedded(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=sparse, dtype=torch.float64)

    def forward(self, indices):
        return self.embedding(indices).sum(1)


@ranks(1, 2)
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_sparse_gradients_train_as_dense_ones(clip_norm, world_size):
    data = TensorDataset(torch.arange(24) % 7, torch.linspace(0, 1, 24, dtype=torch.float64))
    found = []
    for sparse in (False, True):
        handler = NNHandler(Embedded, seed=0, sparse=sparse)
        handler.set_optimizer(torch.optim.SGD, lr=0.1)
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(data, batch_size=8 // world_size)
        found.append(handler.train(2, clip_norm=clip_norm)["loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@ranks(1, 2)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_of_16_bits_whose_norm_does_not_fit_into_them(clip_norm):
    handler = make_handler(8, dtype=torch.float16, lr=1e-3)
    handler.set_optimizer(torch.optim.SGD, lr=1e-6)
    handler.set_loss_fn(lambda outputs, targets: (outputs - targets).abs().mean() * 1e4)
    assert all(loss == loss for loss in handler.train(2, clip_norm=clip_norm)["loss"])
    assert handler.history["skipped"] == [0, 0]


@ranks(1, 2)
def test_what_is_not_finite_may_be_ignored(world_size):
    handler = make_handler(GLOBAL_BATCH // world_size, data=regression())
    assert handler.train(3, non_finite="ignore")["loss"] == pytest.approx(reference(3)[0], rel=1e-10)
    handler.set_loss_fn(Poisoned([0], 2))
    handler.train(4, non_finite="ignore")
    assert handler.history["skipped"] == [0, 0, 0, 0]
    assert not all(parameter.isfinite().all() for parameter in handler.module.parameters())
