"""What a handler saves once another rank has failed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from distman import DistributedManager, JobFailed
from distman.handler import Callback
from distman.testing import ranks

from .problems import make_handler, regression


class Dying(Callback):
    """Rank 1 dies within a step, and the others wait for its gradients."""

    def on_before_backward(self, handler, loss):
        if DistributedManager().rank == 1 and handler.num_steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class DyingLater(Callback):
    """Rank 1 dies before a validation, at whose begin the others wait for the buffers of rank 0."""

    def on_validation_start(self, handler):
        if DistributedManager().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Hears(Callback):
    """Hears of the numbers of each step, as a tracker does."""

    def on_step_records(self, handler, records):
        pass


@ranks(2, manager=False, dies=[1])
@pytest.mark.parametrize("callbacks", [[Hears, Dying], [DyingLater]])
def test_each_rank_saves_a_file_of_its_own(callbacks, monkeypatch, tmp_path, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.chdir(tmp_path)
    DistributedManager.initialize(timeout=60)
    handler = make_handler(4)
    handler.set_val_loader(regression(), batch_size=4)
    handler.module.register_buffer("of_rank_zero", torch.zeros(1))
    for callback in callbacks:
        handler.add_callback(callback())
    with pytest.raises((JobFailed, RuntimeError)):
        handler.train(2)
    handler.save("model.pt")
    assert [path.name for path in Path().iterdir()] == [f"model.rank{rank}.pt"]
    assert set(torch.load("model.rank0.pt")) >= {"model", "training", "history"}
