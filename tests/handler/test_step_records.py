import pytest
import torch

from distman import NonFiniteLossError
from distman.collectives import all_gather_objects
from distman.handler import Callback
from distman.testing import ranks

from .problems import GLOBAL_BATCH, NUM_SAMPLES, make_handler, regression


class Records(Callback):
    def __init__(self):
        self.records, self.norms = [], []

    def on_before_optimizer_step(self, handler):
        self.norms.append(torch.nn.utils.get_total_norm([one.grad for one in handler.module.parameters()]).item())

    def on_step_records(self, handler, records):
        self.records += records

    def __getitem__(self, name):
        return [record[name] for record in self.records]


@ranks(1, 2)
def test_each_step_has_its_numbers_the_same_on_all_ranks(world_size):
    handler = make_handler(GLOBAL_BATCH // world_size)
    handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5, per="step")
    records = Records()
    handler.add_callback(records)
    history = handler.train(2, accumulate=2, clip_norm=1e-3)
    assert records["step"] == [1, 2, 3, 4, 5, 6]
    assert records["epoch"] == [0, 0, 0, 1, 1, 1]
    assert records["lr"] == [0.02 * 0.5**step for step in range(6)]
    assert records["grad_norm"] == pytest.approx(records.norms)
    sizes = [2 * GLOBAL_BATCH, 2 * GLOBAL_BATCH, NUM_SAMPLES - 4 * GLOBAL_BATCH]
    for epoch, loss in enumerate(history["loss"]):
        parts = zip(records["loss"][3 * epoch : 3 * epoch + 3], sizes, strict=True)
        assert sum(part * size for part, size in parts) / NUM_SAMPLES == pytest.approx(loss)
    assert all(0 <= share <= 1 for share in records["waiting"])
    assert min(records["samples_per_second"]) > 0
    assert all_gather_objects(records.records) == [records.records] * world_size


@ranks(1)
def test_the_rate_is_that_of_the_step_where_a_step_of_ones_own_sets_the_next_one():
    handler = make_handler(GLOBAL_BATCH)
    used = []

    def step(stepper, batch):
        stepper.backward(torch.nn.functional.mse_loss(handler.module(batch[0]), batch[1]))
        (group,) = handler.optimizer.param_groups
        used.append(group["lr"])
        stepper.step()
        group["lr"] /= 2

    handler.set_step(step)
    records = Records()
    handler.add_callback(records)
    handler.train(1)
    assert records["lr"] == used
    assert len({*used}) > 2


@ranks(2)
def test_one_rank_may_ask_alone_and_has_what_was_before_an_error(rank):
    handler = make_handler(8, lr=1e200)
    records = Records()
    if rank == 1:
        handler.add_callback(records)
    with pytest.raises(NonFiniteLossError):
        handler.train(2)
    assert len(records.records) == handler.num_steps * rank


class Saves(Callback):
    """Saves in the middle of what is read together, and notes what was told by then."""

    def __init__(self, path, records):
        self.path, self.records = path, records

    def on_step_end(self, handler, step):
        if step == 3:
            handler.save(self.path)
            self.told = self.records["step"]


@ranks(1)
def test_a_checkpoint_comes_after_the_numbers_of_its_steps(tmp_path):
    handler = make_handler(8, data=regression(num_samples=64))
    records = Records()
    handler.add_callback(records)
    saves = Saves(tmp_path / "saved.pt", records)
    handler.add_callback(saves)
    handler.train(1)
    assert saves.told == [1, 2, 3]
    assert records["step"] == list(range(1, 9))
