"""What a training tells: records, lines, bars and pictures."""

import io
import logging
import math
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from distman import DistributedManager
from distman.errors import RankFailedError
from distman.handler import Callback, EarlyStopping, History, LearningRateMonitor
from distman.handler._reporting import training_logger
from distman.testing import ranks

from .problems import make_handler, regression


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


@ranks(2)
def test_early_stopping_waits_as_long_as_it_is_told_to():
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    handler.add_callback(EarlyStopping("val_loss", patience=3, min_delta=1e9))
    assert len(handler.train(10, validate_every=2)) == 8  # the first value is the best; three more are not better
    handler.add_callback(EarlyStopping("val_los"))
    with pytest.raises(
        ValueError, match=r"monitor must be a name in the history, got 'val_los'. The history has \['epoch', "
    ):
        handler.train(10)
    handler = make_handler(8)
    handler.add_metric("constant", lambda _outputs, _targets: 1.0)
    handler.add_callback(EarlyStopping("constant", patience=2, mode="max"))
    assert len(handler.train(10)) == 3


def test_options_of_early_stopping():
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        EarlyStopping(patience=0)
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'low'"):
        EarlyStopping(mode="low")


@ranks(1)
def test_learning_rates_are_recorded():
    handler = make_handler(33, lr=0.5)
    handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5, per="step")
    monitor = LearningRateMonitor()
    handler.add_callback(monitor)
    handler.train(2)
    assert monitor.rates == [0.5, 0.25, 0.125, 0.0625]


@ranks(2)
@pytest.mark.parametrize("mode", ["console", "file", "both", None])
def test_rank_zero_writes_a_line_for_each_epoch(mode, rank, tmp_path):
    path = tmp_path / "logs" / "training.log"
    with redirect_stdout(io.StringIO()) as shown:
        handler = make_handler(8, logger_mode=mode, log_file=path)
        handler.train(2)
    DistributedManager().barrier()
    lines = re.compile(r"epoch [12]/2: loss \d+\.\d+, lr 0\.02, seconds \S+\n")
    assert len(lines.findall(shown.getvalue())) == (2 if rank == 0 and mode in ("console", "both") else 0)
    if mode in ("file", "both"):
        assert len(lines.findall(path.read_text())) == 2
        assert re.match(r"\d{4}-\d\d-\d\d ", path.read_text())
    else:
        assert not path.exists()
    for own in list(training_logger.handlers):
        training_logger.removeHandler(own)
        own.close()
    training_logger.propagate = True
    training_logger.setLevel(logging.NOTSET)


@ranks(2)
def test_rank_zero_shows_a_bar(rank):
    handler = make_handler(8)
    with redirect_stderr(io.StringIO()) as shown:
        handler.train(2, progress=True)
    assert ("epoch 2/2" in shown.getvalue() and "/5" in shown.getvalue()) == (rank == 0)
    with redirect_stderr(io.StringIO()) as shown:
        handler.train(3, progress=False)
        handler.train(4)
    assert shown.getvalue() == ""


@ranks(1, 2)
def test_pictures_are_drawn_on_rank_zero(tmp_path):
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
    handler.train(3, validate_every=2)
    handler.plot_losses(tmp_path / "plots" / "losses.png", log=True)
    handler.plot_metrics(tmp_path / "plots" / "metrics.png")
    handler.plot_metrics(tmp_path / "rates.svg", ["lr"])
    for name in ("losses", "metrics"):
        picture = imread(tmp_path / "plots" / f"{name}.png")
        assert picture.shape[:2] == (600, 960)
        assert 0.5 < picture.mean() < 0.999
    assert "<svg" in (tmp_path / "rates.svg").read_text()
    with pytest.raises(RankFailedError, match=r"names must be in the history, got \['no'\]"):
        handler.plot_metrics(tmp_path / "no.png", ["no"])
    assert not Path(tmp_path / "no.png").exists()


def test_history():
    history = History()
    assert (len(history), history.names, history["loss"], history.best("loss")) == (0, [], [], None)
    history.add({"epoch": 0.0, "loss": 2.0})
    history.add({"epoch": 1.0, "loss": 1.0, "f1": 0.5})
    history.add({"epoch": 2.0, "loss": math.nan, "f1": 0.5})
    assert history.best("loss") == 1
    assert history.best("f1", mode="max") == 1
    assert history.best("no") is None
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'Min'"):
        history.best("loss", mode="Min")
    assert history.names == ["epoch", "loss", "f1"]
    again = History()
    again.load_state_dict(history.state_dict())
    assert [*again][:2] == [*history][:2]
