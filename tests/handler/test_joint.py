"""An error that one rank raises, and perhaps catches, is heard by all that would wait for it."""

import pytest
import torch

from distman import DistributedManager, JobFailed, NonFiniteLossError
from distman.handler import Callback
from distman.testing import ranks

from .problems import make_handler, regression


class OnRankOne:
    """Raises at the second call on rank 1."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, *_):
        self.num_calls += 1
        if DistributedManager().rank == 1 and self.num_calls == 2:
            raise ValueError("of one rank alone")


class Broken(Callback):
    def __init__(self):
        self.may_raise = OnRankOne()

    def on_step_end(self, handler, step):
        self.may_raise()


class Batches:
    def __iter__(self):
        may_raise = OnRankOne()
        for batch in zip(*(tensor.split(8) for tensor in regression().tensors), strict=True):
            may_raise()
            yield batch


def break_callback(handler):
    handler.add_callback(Broken())


def break_loader(handler):
    handler.set_train_loader(Batches())


def break_step(handler):
    may_raise = OnRankOne()

    def step(stepper, batch):
        stepper.backward(stepper.module(batch[0]).mean())
        may_raise()
        stepper.step()

    handler.set_step(step)


def break_metric_of_validation(handler):
    may_raise = OnRankOne()

    def metric(outputs, targets):
        if not torch.is_grad_enabled() and not handler.module.training:
            may_raise()
        return (outputs - targets).abs().mean()

    handler.add_metric("error", metric)


@ranks(2, manager=False)
@pytest.mark.parametrize("break_it", [break_callback, break_loader, break_step, break_metric_of_validation])
def test_an_error_that_one_rank_catches_is_heard_by_the_others(break_it, rank, monkeypatch):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    break_it(handler)
    told = r"of one rank alone. It has left train\(\) on this rank but not on rank 0 \(.*Handle it where it is raised"
    with pytest.raises(ValueError if rank else JobFailed, match="of one rank alone" if rank else told):
        handler.train(2)
    if rank:
        with pytest.raises(JobFailed, match=told):  # its collectives would meet those of another call
            handler.predict(regression())


@ranks(3)
def test_what_all_ranks_raise_leaves_them_at_work():
    handler = make_handler(8, lr=1e200)
    for _ in range(2):
        with pytest.raises(NonFiniteLossError):
            handler.train(2)
    handler.set_loss_fn(lambda outputs, targets: (outputs - targets).square().flatten())
    with pytest.raises(ValueError, match="the loss must be one number"):
        handler.train(2)
    DistributedManager().barrier("all are well")
