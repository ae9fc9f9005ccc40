import inspect

import numpy as np
import pytest
import torch

from distman import DistributedManager, on_rank
from distman.collectives import all_gather_objects
from distman.errors import DistmanError
from distman.handler import Callback
from distman.handler._events import EVENTS, Callbacks
from distman.testing import ranks

from ..test_docs import REPOSITORY
from .problems import make_handler, regression


class Order(Callback):
    """Notes the names of all events."""

    def __init__(self):
        self.calls = []


for name in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Order, name, lambda self, *_, name=name: self.calls.append(name.removeprefix("on_")))


@ranks(2)
def test_callbacks_are_called_in_order():
    handler = make_handler(24)
    handler.set_val_loader(regression(), batch_size=24)
    order = Order()
    handler.add_callback(order)
    handler.train(1, accumulate=2)
    batch = ["train_batch_start", "before_backward", "after_backward", "train_batch_end"]
    assert order.calls == [
        *("train_begin", "epoch_begin", *batch, *batch, "before_optimizer_step", "step_records", "step_end"),
        *("validation_start", "validation_end", "epoch_end", "train_end"),
    ]
    order.calls.clear()
    handler.train(2, validate_every_steps=2)
    step = [*batch, "before_optimizer_step", "step_end"]
    validation = ["validation_start", "validation_end"]
    calls = [call for call in order.calls if call != "step_records"]  # which come early where steps take seconds
    assert calls == ["train_begin", "epoch_begin", *step, *validation, *step, "epoch_end", "train_end"]


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, handler, batch, loss):
        self.losses.append(loss)


@ranks(1, 2)
@pytest.mark.parametrize("with_metric", [False, True])
def test_the_loss_of_a_batch_is_as_the_loss_function_returned_it(with_metric):
    handler, losses = make_handler(24), Losses()
    handler.set_loss_fn(lambda output, target: torch.nn.functional.mse_loss(output, target).float())
    if with_metric:
        handler.add_metric("error", torch.nn.functional.l1_loss)
    handler.add_callback(losses)
    handler.train(1)
    assert {(loss.dtype, loss.shape, loss.requires_grad) for loss in losses.losses} == {(torch.float32, (), False)}


class Halves(Callback):
    """Halves the gradient, as half the learning rate would."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, handler):
        for parameter in handler.module.parameters():
            parameter.grad /= 2
        self.norms.append(torch.nn.utils.get_total_norm([one.grad for one in handler.module.parameters()]).item())


@ranks(2)
def test_a_callback_may_change_the_gradient_of_all_ranks_before_it_is_clipped():
    weights = []
    for factor, callback in ((1, Halves()), (2, Callback())):
        handler = make_handler(8)
        handler.set_optimizer(torch.optim.SGD, lr=0.1 / factor)
        handler.add_callback(callback)
        handler.train(2)
        weights.append(handler.module.first.weight.detach())
    assert torch.equal(*weights)
    halves = Halves()
    handler.add_callback(halves)
    handler.train(3, clip_norm=1e-3)
    assert min(halves.norms) > 1e-3
    assert all_gather_objects(halves.norms) == [halves.norms] * 2


class Broken(Callback):
    def __init__(self):
        self.heard = []

    def on_epoch_end(self, handler, record):
        raise ZeroDivisionError("an error of a callback")

    def on_exception(self, handler, error):
        self.heard.append(type(error))


@ranks(2)
def test_errors_of_callbacks_are_not_swallowed():
    handler = make_handler(8)
    broken = Broken()
    handler.add_callback(broken)
    with pytest.raises(ZeroDivisionError, match="an error of a callback"):
        handler.train(1)
    assert broken.heard == [ZeroDivisionError]


class StopsOnOneRank(Callback):
    def on_epoch_end(self, handler, record):
        if DistributedManager().rank == 1 and record["epoch"] == 1:
            handler.stop("rank 1 has seen enough")


@ranks(2, 4)
def test_a_stop_of_one_rank_is_one_of_all():
    handler = make_handler(4)
    handler.add_callback(StopsOnOneRank())
    assert len(handler.train(5)) == 2


class Notes(Callback):
    def __init__(self, value):
        self.value = value

    def on_validation_end(self, handler, record):
        record["val_noted"] = self.value

    def on_epoch_end(self, handler, record):
        record["noted"] = self.value


@ranks(1)
@pytest.mark.parametrize("value", [np.float32(2.5), np.float64(2.5), torch.tensor(2.5), torch.tensor([2.5])])
def test_callbacks_may_note_numbers_of_numpy_and_torch(value, tmp_path):
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    handler.add_callback(Notes(value))
    handler.auto_save(tmp_path)
    history = handler.train(1)
    assert (history["noted"], history["val_noted"]) == ([2.5], [2.5])


@ranks(1)
@pytest.mark.parametrize("value", ["good", None, torch.ones(2)])
def test_anything_else_in_a_record_is_refused_by_name(value):
    handler = make_handler(8)
    handler.add_callback(Notes(value))
    with pytest.raises(TypeError, match="noted in the record of an epoch must be a number, got a"):
        handler.train(1)


class Misspelt(Callback):
    def on_epoch_ends(self, handler, record):
        raise AssertionError


class OfLightning(Callback):
    def on_train_epoch_end(self, trainer, module):
        raise AssertionError


class LacksAnArgument(Callback):
    def on_step_end(self, handler):
        raise AssertionError


class WantsOneMore(Callback):
    @on_rank(0)
    def on_epoch_end(self, handler, record, extra):
        raise AssertionError


class TakesAny(Callback):
    def on_step_end(self, *args):
        self.args = args

    def on_epoch_end(self, handler, record, extra=None):
        self.extra = extra


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_save_within_a_validation_is_refused(strategy, tmp_path):
    handler = make_handler(8, strategy=strategy)
    handler.set_val_loader(regression(), batch_size=40)
    handler.add_metric("saves", lambda *_: handler.save(tmp_path / "saved.pt") or 0.0 if not handler.history else 0.0)
    handler.module.eval()
    with pytest.raises(DistmanError, match="must be taken outside of validate"):
        handler.validate()
    handler.clear_metrics()
    handler.save(tmp_path / "saved.pt")


def test_methods_that_would_not_be_called_are_refused_when_they_are_added():
    handler = make_handler(8)
    for callback, told in (
        (Misspelt(), r"got on_epoch_ends\(\) of Misspelt. Did you mean on_epoch_end\(self, handler"),
        (OfLightning(), r"got on_train_epoch_end\(\) of OfLightning.*The events are on_train_begin, "),
        (LacksAnArgument(), r"on_step_end\(\) must take handler, step, got \(handler\) in LacksAnArgument. Write def"),
        (WantsOneMore(), r"on_epoch_end\(\) must take handler, record, got \(handler, record, extra\) in WantsOneMore"),
    ):
        with pytest.raises(TypeError, match=told):
            handler.add_callback(callback)
    handler.add_callback(taken := TakesAny())
    handler.train(1)
    assert len(taken.args) == 2


def test_the_table_of_events_has_all_with_their_arguments():
    page = (REPOSITORY / "docs" / "reference" / "callbacks.md").read_text()
    for name, event in EVENTS.items():
        arguments = ", ".join([*inspect.signature(event).parameters][1:])
        assert f"`{name}({arguments})`" in page


def test_a_callback_that_is_new_is_not_called_for_what_it_has_missed():
    events = []

    class Later(Callback):
        def on_epoch_end(self, handler, record):
            events.append(record)

    before, after = Callbacks(), Callbacks()
    before.emit_rest("on_epoch_end", {"epoch": 0})
    after.handler = lambda: None
    after.add(Later(), is_last=False)
    after.set_called(before.called())
    after.emit_rest("on_epoch_end", {"epoch": 0})
    assert not events
    after.begin()
    after.emit_rest("on_epoch_end", {"epoch": 1})
    assert events == [{"epoch": 1}]
