import numpy as np
import pytest
import torch

from distman import DistributedManager
from distman.handler import Callback
from distman.testing import ranks

from .problems import make_handler


class Order(Callback):
    def __init__(self):
        self.calls = []

    def on_train_begin(self, handler):
        self.calls.append("train begins")

    def on_epoch_begin(self, handler, epoch):
        self.calls.append(f"epoch {epoch} begins")

    def on_step_end(self, handler, step):
        self.calls.append(f"step {step}")

    def on_epoch_end(self, handler, record):
        self.calls.append(f"epoch {int(record['epoch'])} ends")
        record["noted"] = 7.0

    def on_train_end(self, handler):
        self.calls.append("train ends")


@ranks(2)
def test_callbacks_are_called_in_order_and_add_to_the_history():
    handler = make_handler(24)
    order = Order()
    handler.add_callback(order)
    handler.train(2)
    assert order.calls == [
        "train begins",
        *("epoch 0 begins", "step 1", "step 2", "epoch 0 ends"),
        *("epoch 1 begins", "step 3", "step 4", "epoch 1 ends"),
        "train ends",
    ]
    assert handler.history["noted"] == [7.0, 7.0]


class Broken(Callback):
    def on_epoch_end(self, handler, record):
        raise ZeroDivisionError("an error of a callback")


@ranks(2)
def test_errors_of_callbacks_are_not_swallowed():
    handler = make_handler(8)
    handler.add_callback(Broken())
    with pytest.raises(ZeroDivisionError, match="an error of a callback"):
        handler.train(1)


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

    def on_epoch_end(self, handler, record):
        record["noted"] = self.value


@ranks(1)
@pytest.mark.parametrize("value", [np.float32(2.5), np.float64(2.5), torch.tensor(2.5), torch.tensor([2.5])])
def test_callbacks_may_note_numbers_of_numpy_and_torch(value, tmp_path):
    handler = make_handler(8)
    handler.add_callback(Notes(value))
    handler.auto_save(tmp_path)
    assert handler.train(1)["noted"] == [2.5]


@ranks(1)
@pytest.mark.parametrize("value", ["good", None, torch.ones(2)])
def test_anything_else_in_a_record_is_refused_by_name(value):
    handler = make_handler(8)
    handler.add_callback(Notes(value))
    with pytest.raises(TypeError, match="noted in the record of an epoch must be a number, got a"):
        handler.train(1)
