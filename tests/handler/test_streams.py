"""Training on streams, and on epochs that end before the data: nothing is lost, read twice, or waited for in vain."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from distman import DistributedManager, Stepper
from distman.collectives import all_gather_objects
from distman.data import distributed_stream
from distman.errors import DistmanError
from distman.handler import Callback, EarlyStopping, ModelCheckpoint, NNHandler, Preempted
from distman.testing import ranks

from .problems import GLOBAL_BATCH, make_handler, reference, regression


class Shards(IterableDataset):
    """Shards of samples, each with its number and that of the epoch, in an order of its own in each epoch."""

    def __init__(self, lengths, *, first=0, epoch=0):
        self.lengths, self.first, self.epoch = lengths, first, epoch
        self.num_shards, self.num_read = len(lengths), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, num_shards, index):
        return type(self)([self.lengths[index]], first=self.first + sum(self.lengths[:index]), epoch=self.epoch)

    def __iter__(self):
        order = torch.randperm(sum(self.lengths), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.num_read < len(order):
            self.num_read += 1
            number = self.first + order[self.num_read - 1]
            yield self.inputs(number), 1000 * self.epoch + number
        self.num_read = 0

    def inputs(self, number):
        return torch.randn(4) * 0.1 + number / 10


class Positioned(Shards):
    """The same without random numbers, with a position that can be restored."""

    def inputs(self, number):
        return torch.full((4,), number / 10)

    def state_dict(self):
        return {"num_read": self.num_read}

    def load_state_dict(self, state):
        self.num_read = state["num_read"]


class Resumable(DataLoader):
    """A loader with a position, which begins the next epoch where that is the end, as torchdata's does."""

    position = 0

    def __iter__(self):
        begin, self.position = self.position, 0
        return self.count(itertools.islice(super().__iter__(), begin, None), begin)

    def count(self, batches, begin):
        for position, batch in enumerate(batches, start=begin + 1):
            self.position = position
            yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Endless(IterableDataset):
    """As many samples as are asked for."""

    def __iter__(self):
        return ((torch.full((4,), number / 10), number) for number in itertools.count())


class Network(nn.Module):
    """A network that also keeps a sum of what it has seen in training."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            self.total += inputs.detach().sum()
        return self.layers(inputs)


class CutOffError(Exception):
    pass


class CutsOff(Callback):
    """Ends the training after a step, as a kill would, and keeps the batches that counted up to the one before."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, handler, step):
        if step == self.step:
            raise CutOffError
        self.saved = [*handler.noted]


class AsksForAStop(Callback):
    """Asks on the last rank."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, handler, step):
        manager = DistributedManager()
        if step == self.step and manager.rank == manager.world_size - 1:
            manager.request_stop()


def prepare(loader, folder=None, *callbacks, every_steps=None):
    """Return a handler that trains with a loader, and the batches on this rank that counted."""
    batches = []

    def note(_outputs, numbers):
        batches.append(numbers.tolist())
        return 0.0

    handler = NNHandler(Network, seed=3)
    handler.set_optimizer(torch.optim.AdamW, lr=0.01)
    handler.set_loss_fn(lambda outputs, numbers: (outputs[:, 0] - numbers % 1000 / 10).square().mean())
    handler.set_train_loader(loader)
    handler.add_metric("noted", note)
    handler.noted = batches
    for callback in callbacks:
        handler.add_callback(callback)
    if folder is not None:
        handler.auto_save(folder, every_steps=every_steps)
    return handler, batches


def assert_same(one, other):
    assert_weights_are_equal(one, other)
    for records, expected in ((one.history, other.history), (one.history.validations, other.history.validations)):
        assert [without_time(record) for record in records] == [without_time(record) for record in expected]


def without_time(record):
    return {name: value for name, value in record.items() if name != "seconds"}


def draw(seed, rank):
    """Return what makes a loader, its number of samples, the options of a training, and where to cut it off."""
    source = random.Random(seed)  # noqa: S311 - no secret
    lengths = [source.randrange(9) for _ in range(source.randrange(1, 6))] + [3]
    kind, batch_size = source.choice([Shards, Positioned]), source.randrange(1, 5)
    loader = source.choice([DataLoader, Resumable]) if kind is Positioned else DataLoader
    num_workers = [source.randrange(3) for _ in range(3)][rank] if seed % 2 else 0
    options = {"accumulate": source.randrange(1, 3), "limit_batches": source.choice([None, 1, 2, 3])}

    def make():
        return loader(distributed_stream(kind(lengths)), batch_size=batch_size, num_workers=num_workers)

    return make, sum(lengths), options, source.randrange(2, 6)


@ranks(1, 3)
@pytest.mark.parametrize("seed", range(2))
def test_every_sample_counts_once_and_a_run_that_was_cut_off_goes_on_bit_for_bit(seed, rank, world_size, tmp_path):
    make, num_samples, options, cut_at = draw(10 * world_size + seed, rank)
    whole, batches = prepare(make())
    whole.train(max_steps=6, **options)
    numbers = sorted(number for own in all_gather_objects(batches) for batch in own for number in batch)
    last = numbers[-1] // 1000
    for epoch in range(last):
        assert [number % 1000 for number in numbers if number // 1000 == epoch] == list(range(num_samples))
    in_last = [number for number in numbers if number // 1000 == last]
    assert len(set(in_last)) == len(in_last)

    cut = CutsOff(cut_at)
    with pytest.raises(CutOffError):
        prepare(make(), tmp_path, cut, every_steps=cut_at - 1)[0].train(max_steps=6, **options)
    resumed, after = prepare(make(), tmp_path)
    resumed.train(max_steps=6, **options)
    assert cut.saved + after == batches
    assert_same(resumed, whole)
    assert whole.num_steps == 6


@ranks(1, 2)
def test_an_epoch_of_few_batches_is_gone_on_with_by_the_next(world_size):
    handler, batches = prepare(DataLoader(distributed_stream(Positioned([12])), batch_size=2))
    epochs = Epochs()
    handler.add_callback(epochs)
    handler.train(5, limit_batches=4 // world_size)
    in_epochs = [4, 2, 4, 2, 4] if world_size == 1 else [2, 1, 2, 1, 2]
    assert epochs.num_steps == list(itertools.accumulate(in_epochs))
    everyone = [number for own in all_gather_objects(batches) for batch in own for number in batch]
    assert len(everyone) == len(set(everyone)) == 12 + 12 + 8
    other = make_handler(GLOBAL_BATCH // world_size)
    other.train(limit_batches=2, max_steps=10)  # the five batches of 65 samples, twice
    assert len(other.history) == 6
    expected = reference(2)
    for own, weights in zip(other.module.parameters(), expected[1], strict=True):
        torch.testing.assert_close(own.detach(), weights, rtol=1e-8, atol=1e-10)


class Epochs(Callback):
    def __init__(self):
        self.num_steps = []

    def on_epoch_end(self, handler, record):
        self.num_steps.append(handler.num_steps)


@ranks(1, 2)
def test_steps_end_a_training_and_one_that_goes_on_reads_what_is_left():
    loader = DataLoader(distributed_stream(Endless()), batch_size=2)
    handler, batches = prepare(loader)
    handler.train(max_steps=3)
    handler.train(max_steps=3)
    assert (handler.num_steps, len(handler.history)) == (3, 1)
    handler.train(max_steps=5)
    handler.train(3, max_steps=6)
    assert (handler.num_steps, len(handler.history)) == (6, 3)
    everyone = [number for own in all_gather_objects(batches) for batch in own for number in batch]
    assert sorted(everyone) == list(range(len(everyone)))
    whole, _ = prepare(loader)
    whole.train(max_steps=6)
    assert_weights_are_equal(handler, whole)


@ranks(1, 2)
def test_a_stop_takes_effect_within_a_stream_without_an_end(world_size, tmp_path):
    def make(*callbacks):
        handler, _ = prepare(DataLoader(distributed_stream(Endless()), 2), tmp_path, *callbacks, every_steps=1000)
        handler.set_val_loader([(torch.ones(4), 1)], batch_size=1)
        return handler

    stopped = make(AsksForAStop(4))
    with pytest.raises(Preempted):
        stopped.train(max_steps=1000, validate_every_steps=1)
    num_steps = stopped.num_steps
    assert 4 <= num_steps < 1000
    assert world_size > 1 or num_steps == 4
    validated = [record["step"] for record in stopped.history.validations]
    before, during = list(range(1, num_steps)), list(range(1, num_steps + 1))  # the validation that it was heard in
    assert validated == before or (validated == during and world_size > 1)
    DistributedManager.cleanup()
    DistributedManager.initialize()
    resumed = make()
    resumed.train(max_steps=num_steps + 2, validate_every_steps=1)
    assert [record["step"] for record in resumed.history.validations] == list(range(1, num_steps + 3))


class Heard(Callback):
    def __init__(self):
        self.records = []

    def on_validation_end(self, handler, record):
        self.records.append(dict(record))
        record["noted"] = record["step"]


@ranks(1, 2)
def test_validations_within_an_epoch_are_heard_recorded_and_saved(tmp_path):
    def make(*callbacks):
        handler = make_handler(8, lr=0.3)
        handler.set_val_loader(regression(), batch_size=9)
        handler.set_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9)
        for callback in callbacks:
            handler.add_callback(callback)
        return handler

    heard, keeper = Heard(), ModelCheckpoint(tmp_path, keep=9)
    handler = make(heard, keeper)
    handler.train(max_steps=7, validate_every_steps=3)
    validations = handler.history.validations
    assert [record["step"] for record in heard.records] == [3, 6]
    assert [record["noted"] for record in validations] == [3, 6]
    assert "val_loss" not in handler.history.names
    assert validations[1]["lr"] < validations[0]["lr"]
    other = make()
    other.load(keeper.folder.best())
    best = min(validations, key=lambda record: record["val_loss"])
    assert other.num_steps == best["step"]
    assert other.validate()["loss"] == best["val_loss"]
    other.train(max_steps=7, validate_every_steps=3)
    assert [record["val_loss"] for record in other.history.validations] == [one["val_loss"] for one in validations]
    assert_weights_are_equal(other, handler)

    stopping = make(EarlyStopping(patience=1, min_delta=1e9))
    assert len(stopping.train(9, validate_every_steps=2)) == 1
    assert stopping.num_steps == 4
    misspelled = make(EarlyStopping("val_los"))
    with pytest.raises(ValueError, match="monitor must be a name in the history, got 'val_los'"):
        misspelled.train(1, validate_every_steps=1)


def assert_weights_are_equal(one, other):
    left, right = (handler.state_dict()["model"]["module"] for handler in (one, other))  # with the buffers of rank 0
    assert all(torch.equal(left[name], right[name]) for name in right)


@ranks(2)
def test_ranks_that_read_the_same_are_told_so(rank, monkeypatch):
    told = []
    monkeypatch.setattr("distman.training._sources.logger.warning", told.append)
    stream = Positioned([6])
    prepare(DataLoader(distributed_stream(stream), batch_size=2))[0].train(2)
    model = nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len([*stepper.batches([torch.ones(2, 1)])]) == 1  # constant data say nothing
    assert told == []
    prepare(DataLoader(stream, batch_size=2))[0].train(2)
    assert [message.split(":")[0] for message in told] == ["the first sample is the same on all ranks"] * (rank == 0)


@ranks(2)
def test_a_shuffled_loader_is_no_part_either(rank, monkeypatch):
    told = []
    monkeypatch.setattr("distman.training._sources.logger.warning", told.append)
    model = nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = torch.arange(8.0).reshape(4, 2) + 10 * rank
    torch.manual_seed(rank)
    drawn = torch.get_rng_state()
    assert len([*stepper.batches(DataLoader(own, batch_size=2, sampler=torch.utils.data.RandomSampler(own)))]) == 2
    torch.set_rng_state(drawn)
    assert told == []
    whole = torch.arange(8.0).reshape(4, 2)
    assert len([*stepper.batches(DataLoader(whole, batch_size=2, shuffle=True))]) == 2
    assert len(told) == (rank == 0)


@ranks(1)
def test_limits_are_checked():
    handler = make_handler(8)
    for options, message in (
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"epochs": 1, "limit_batches": -1}, "limit_batches must be at least 1, got -1"),
        ({"epochs": 1, "validate_every_steps": 0}, "validate_every_steps must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            handler.train(**options)
    with pytest.raises(TypeError, match=r"limit_batches must be a whole number, got 0\.5"):
        handler.train(1, limit_batches=0.5)
    with pytest.raises(TypeError, match=r"epochs must be a whole number, got None\. .* or max_steps"):
        handler.train()
    with pytest.raises(DistmanError, match=r"no data to validate with. Call set_val_loader\(\)"):
        handler.train(1, validate_every_steps=1)
