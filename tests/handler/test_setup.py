import re

import pytest
import torch
from torch import nn

from distman.data import distributed_loader
from distman.errors import DistmanError
from distman.handler import NNHandler
from distman.testing import ranks

from .problems import Network, regression


class Empty:
    def __iter__(self):
        return iter(())


def test_a_handler_says_what_it_is():
    handler = NNHandler(Network)
    assert repr(handler) == "NNHandler(Network, no optimizer, History(0 epochs: nothing yet), num_steps=0)"
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    assert repr(handler).startswith("NNHandler(Network, SGD, ")


def test_a_class_where_a_function_is_meant_and_numbers_in_strings_are_told():
    handler = NNHandler(Network)
    with pytest.raises(TypeError, match=r"loss_fn must be a function, got the class MSELoss\. Pass MSELoss\(\)"):
        handler.set_loss_fn(nn.MSELoss)
    for text in ("0.1", "1e-3", " 3 ", "-.5"):
        with pytest.raises(TypeError, match=r"lr must be a number, got the string .*\. Pass float\("):
            handler.set_optimizer(torch.optim.SGD, lr=text)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="gamma must be a number"):
        handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma="0.9")
    handler.set_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="max")


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
        ({"amp": "fp8"}, "amp must be one of bf16, fp16, None, got 'fp8'"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0"),
        ({"ema_decay": 1.0}, "ema_decay must be between 0 and 1"),
        ({"check_every": 0}, "check_every must be at least 1, got 0"),
        ({"non_finite": "stop"}, "non_finite must be one of raise, skip, ignore, got 'stop'"),
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
    handler.set_train_loader(regression(), batch_size=8)
    handler.set_val_loader(regression(), batch_size=8)
    for loss_fn, message in (
        (lambda outputs, targets: (outputs - targets).square(), r"the loss must be one number, got shape \(8, 1\)"),
        (lambda outputs, _: {"loss": outputs.sum()}, "the loss must be a tensor with one element, got a dict"),
        (lambda outputs, _: outputs.sum().item(), "the loss must be a tensor with one element, got a float"),
    ):
        handler.set_loss_fn(loss_fn)
        for call in (lambda: handler.train(1), handler.validate):
            with pytest.raises((TypeError, ValueError), match=message):
                call()
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_optimizer(torch.optim.LBFGS)
    with pytest.raises(TypeError, match="the optimizer must step without a closure, got LBFGS"):
        handler.train(1)
    with pytest.raises(TypeError, match="data must not be a list without batch_size, which could hold samples or"):
        handler.set_train_loader([regression().tensors])


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


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([{"x": torch.ones(4), "y": torch.ones(1)}] * 3, "got one that is a mapping with x, y: linear"),
        ([(torch.ones(4),)] * 3, "got one that has no targets: "),
    ],
)
def test_a_batch_that_a_function_ought_to_take_apart_is_told(samples, told):
    handler = NNHandler(nn.Linear, in_features=4, out_features=1)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(samples, batch_size=3)
    with pytest.raises(TypeError, match=told + r".*Pass set_loss_fn\(loss_fn, forward=function\)"):
        handler.train(1)
