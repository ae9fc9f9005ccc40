"""A training that is cut off anywhere and gone on with is the training that was never cut off, bit for bit."""

import copy
import itertools
import logging
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from distman import DistributedManager, checkpoint, on_rank
from distman.checkpoint import CheckpointFolder
from distman.collectives import all_gather_objects
from distman.errors import CheckpointError, RankFailedError
from distman.handler import Callback, EarlyStopping, ModelCheckpoint, NNHandler, Preempted
from distman.testing import ranks

from .problems import GLOBAL_BATCH, NUM_SAMPLES, Network, Normed, Rates, make_handler, reference, regression


class CutOffError(Exception):
    pass


class CutsOff(Callback):
    """Ends the training after a step, as a kill would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, handler, step):
        if step == self.step:
            raise CutOffError


class Augmented(Dataset):
    """A regression whose inputs are disturbed anew each time."""

    def __init__(self):
        self.inputs, self.targets = regression(num_samples=72).tensors

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(4, dtype=torch.float64), self.targets[index]


class Drawn(Sampler):
    """Indices drawn with a generator of its own, of NumPy or Python."""

    def __init__(self, kind):
        self.random = np.random.default_rng(3) if kind == "numpy" else random.Random(3)  # noqa: S311 - no secret

    def __len__(self):
        return 72

    def __iter__(self):
        choice = self.random.choice
        return (int(choice(range(72))) for _ in range(72))


class Numbers(IterableDataset):
    """A stream of samples in an order of its own in each epoch."""

    def __init__(self):
        self.data = Augmented()
        self.generator = torch.Generator().manual_seed(DistributedManager().rank)

    def __iter__(self):
        return (self.data[index] for index in torch.randperm(72, generator=self.generator).tolist())


def foreign_loader(kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "stream":
        return DataLoader(Numbers(), batch_size=16)
    if kind in ("numpy", "python"):
        return DataLoader(Augmented(), batch_size=16, sampler=Drawn(kind))
    if kind == "own generator in workers":
        return DataLoader(Augmented(), batch_size=16, shuffle=True, generator=generator, num_workers=1)
    if kind == "own generator":
        weights = torch.arange(1.0, 73)
        return DataLoader(
            Augmented(), 16, sampler=WeightedRandomSampler(weights, 72, generator=generator), generator=generator
        )
    return DataLoader(Augmented(), batch_size=16, shuffle=True)


class BatchNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
        )

    def forward(self, inputs):
        return self.layers(inputs.float()).double()


def prepare(folder, kind, *, every_steps=3, cut_at=None):
    """Return a handler of one kind, which saves into a folder."""
    world_size = DistributedManager().world_size
    handler = NNHandler(BatchNormed, seed=5)
    handler.set_optimizer(torch.optim.AdamW, lr=0.01)
    handler.set_scheduler(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=40, per="step")
    handler.set_loss_fn(nn.functional.mse_loss)
    if kind == "cached":
        handler.set_train_loader(regression(num_samples=72), batch_size=GLOBAL_BATCH // world_size, cached=True)
    elif kind == "workers":
        handler.set_train_loader(Augmented(), batch_size=GLOBAL_BATCH // world_size, num_workers=1)
    elif kind != "plain":
        handler.set_train_loader(foreign_loader(kind))
    else:
        handler.set_train_loader(Augmented(), batch_size=GLOBAL_BATCH // world_size)
    handler.set_val_loader(regression(), batch_size=9)
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
    handler.add_callback(EarlyStopping(patience=100))
    handler.add_callback(Rates())
    if folder is not None:
        handler.auto_save(folder, every_steps=every_steps)
    if cut_at is not None:
        handler.add_callback(CutsOff(cut_at))
    return handler


def weights_of(handler):
    return {name: value.clone() for name, value in handler.module.state_dict().items()}


def without_times(history):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def assert_equal(one, other):
    assert without_times(one.history) == without_times(other.history)
    left, right = weights_of(one), weights_of(other)
    is_main = DistributedManager().is_main  # whose running means are the only ones that are used
    assert all(torch.equal(left[name], right[name]) for name in right if is_main or "running" not in name)
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


@ranks(2)
@pytest.mark.parametrize("kind", ["plain", "cached", "workers", "foreign", "stream"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(kind, tmp_path):
    options = {"accumulate": 2, "clip_norm": 1.0, "ema_decay": 0.9}
    whole = prepare(None, kind)
    whole.train(2, **options)
    num_steps = whole.num_steps
    for cut_at in (4, num_steps) if kind in ("plain", "stream") else (4,):
        folder = tmp_path / str(cut_at)
        with pytest.raises(CutOffError):
            prepare(folder, kind, cut_at=cut_at).train(2, **options)
        resumed = prepare(folder, kind)
        resumed.train(2, **options)
        assert_equal(resumed, whole)
        average = dict(resumed.ema_module.named_parameters())
        assert all(torch.equal(average[name], value) for name, value in whole.ema_module.named_parameters())
    if kind == "plain":
        again = prepare(folder, kind)
        again.train(2, **options)
        assert again.num_steps == num_steps
        assert_equal(again, whole)


@ranks(2)
@pytest.mark.parametrize("kind", ["own generator", "own generator in workers", "numpy", "python"])
def test_a_loader_draws_from_its_own_generator_as_if_it_had_never_been_cut_off(kind, tmp_path):
    whole = prepare(None, kind)
    whole.train(2)
    for saved_at in (5, 7) if kind == "own generator" else (7,):  # at the end of the first epoch, and within the second
        with pytest.raises(CutOffError):
            prepare(tmp_path / str(saved_at), kind, every_steps=saved_at, cut_at=saved_at + 1).train(2)
        resumed = prepare(tmp_path / str(saved_at), kind)
        resumed.train(2)
        assert_equal(resumed, whole)


@ranks(1)
def test_workers_that_persist_are_told_of(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("distman.training._sources.logger.warning", told.append)

    def make():
        handler = prepare(tmp_path, "plain")
        handler.set_train_loader(DataLoader(Augmented(), 16, num_workers=1, persistent_workers=True))
        return handler

    make().train(1)
    assert told == []
    make().train(2)
    assert "Set persistent_workers=False" in told[0]


@ranks(1, 2)
def test_a_stop_that_was_asked_for_is_gone_on_with_bit_for_bit(world_size, tmp_path):
    stopped = prepare(tmp_path, "plain", every_steps=1000)
    stopped.add_callback(AsksForAStop(2, world_size - 1))
    with pytest.raises(Preempted) as caught:
        stopped.train(3)
    assert caught.value.code == 75
    assert 2 <= stopped.num_steps < 15
    DistributedManager.cleanup()
    DistributedManager.initialize()
    whole = prepare(None, "plain")
    whole.train(3)
    resumed = prepare(tmp_path, "plain", every_steps=1000)
    resumed.train(3)
    assert_equal(resumed, whole)


@ranks(2)
@pytest.mark.parametrize(("options", "steps"), [({}, 5), ({"validate_every_steps": 3}, 3)])
def test_a_stop_that_comes_in_a_validation_is_heard_before_another_step(world_size, options, steps, tmp_path):
    stopped = prepare(tmp_path, "plain", every_steps=1000)
    stopped.add_callback(AsksForAStopInAValidation(world_size - 1))
    with pytest.raises(Preempted):
        stopped.train(3, **options)
    assert stopped.num_steps == steps
    DistributedManager.cleanup()
    DistributedManager.initialize()
    whole = prepare(None, "plain")
    whole.train(3, **options)
    resumed = prepare(tmp_path, "plain", every_steps=1000)
    resumed.train(3, **options)
    assert_equal(resumed, whole)


class AsksForAStopInAValidation(Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_validation_start(self, handler):
        if DistributedManager().rank == self.rank:
            DistributedManager().request_stop()
        thread = DistributedManager()._state.stop._thread
        if thread is not None:
            thread.join()  # a validation is long enough for all ranks to hear of it


class AsksForAStop(Callback):
    def __init__(self, step, rank):
        self.step, self.rank = step, rank

    def on_step_end(self, handler, step):
        if step == self.step and DistributedManager().rank == self.rank:
            DistributedManager().request_stop()


@ranks(1, 2)
def test_another_number_of_ranks_goes_on_with_the_same_curve(world_size, tmp_path):
    path = tmp_path / "saved.pt"
    one = make_handler(GLOBAL_BATCH // world_size)
    one.add_callback(SavesAt(path, 7))
    one.train(2)
    state = checkpoint.load(path)
    merged = {**state["training"], "ranks": merge_ranks(state["training"]["ranks"], 3)}
    other = make_handler(GLOBAL_BATCH // world_size)
    other.load_state_dict({**state, "training": merged})
    history = other.train(4)
    assert history["loss"] == pytest.approx(reference(4)[0], rel=1e-10)


def merge_ranks(own, num_ranks):
    """Return what a job of another number of ranks would have saved."""
    total = sum(one["sums"] for one in own)
    rest = [torch.zeros_like(total)] * (num_ranks - 1)
    return [{**own[0], "sums": sums} for sums in [total, *rest]]


class SavesAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_step_end(self, handler, step):
        if step == self.step:
            handler.save(self.path)


@ranks(2)
def test_train_again_goes_on_and_a_finished_one_does_nothing():
    handler = make_handler(8)
    first = handler.train(2)["loss"]
    both = handler.train(4)["loss"]
    assert both == pytest.approx(reference(4)[0], rel=1e-10)
    assert both[:2] == first[:2]
    assert handler.train(4)["loss"] == both
    handler.set_train_loader(regression(), batch_size=16)
    assert len(handler.train(5)["loss"]) == 5


class Batches:
    """What a loader yields, and nothing else of it."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class Sees(Callback):
    """Keeps the samples of all ranks' batches."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, handler, batch):
        self.seen += [int(number) for one in all_gather_objects(batch[0]) for number in one.flatten()]


@ranks(2)
@pytest.mark.parametrize(
    ("kinds", "num_before"),
    [
        *((kinds, 3) for kinds in itertools.product(["dataset", "cached", "loader"], repeat=2)),
        *((("loader", "batches"), 3), (("batches", "cached"), 3)),
        *((("dataset", "loader"), 4), (("loader", "cached"), 4), (("cached", "dataset"), 4)),  # after a whole epoch
    ],
)
def test_data_that_replace_others_are_read_from_the_beginning(kinds, num_before, rank, world_size):
    handler, sees = NNHandler(nn.Linear, in_features=1, out_features=1), Sees()
    handler.set_optimizer(torch.optim.SGD, lr=0.0)
    handler.set_loss_fn(lambda outputs, _: outputs.mean())
    handler.add_callback(sees)

    def set_data(kind, first, num_samples, seed):
        numbers = torch.arange(first, first + float(num_samples))[:, None]
        if kind in ("loader", "batches"):
            loader = DataLoader(TensorDataset(numbers[rank::world_size]), batch_size=2 // world_size)
            handler.set_train_loader(Batches(loader) if kind == "batches" else loader)
        else:
            options = {"batch_size": 2 // world_size, "seed": seed, "cached": kind == "cached"}
            handler.set_train_loader(TensorDataset(numbers), **options)

    set_data(kinds[0], 0, 8, 1)
    handler.train(max_steps=num_before)
    set_data(kinds[1], 100, 10, 2)
    sees.seen.clear()
    handler.train(max_steps=num_before + 2)
    handler.train(len(handler.history) + 1)  # goes on with the rest of these data
    assert sorted(sees.seen) == [*range(100, 110)]


@ranks(1, 2)
def test_save_and_load(tmp_path, rank):
    handler = make_handler(8, dtype=torch.float32)
    handler.train(2, ema_decay=0.5)
    handler.save(tmp_path / "model.pt")
    loaded = make_handler(8, dtype=torch.float32)
    loaded.load(tmp_path / "model.pt")
    inputs = regression(torch.float32).tensors[0]
    assert torch.equal(loaded(inputs), handler(inputs))
    expected, found = handler.predict(inputs), loaded.predict(inputs)
    if rank == 0:
        assert torch.equal(found, expected)
        assert not torch.equal(found, handler(inputs))
    assert loaded.history["loss"] == handler.history["loss"]
    resumed = make_handler(8, dtype=torch.float32)
    resumed.load(tmp_path / "model.pt")
    resumed.save(tmp_path / "again.pt")
    resumed.train(3, ema_decay=0.5)
    handler.train(3, ema_decay=0.5)
    assert_equal(resumed, handler)
    again = make_handler(8, dtype=torch.float32)
    again.load(tmp_path / "again.pt")
    assert without_times(again.train(3, ema_decay=0.5)) == without_times(resumed.history)


@ranks(1, 2)
@pytest.mark.parametrize("from_file", [False, True])
def test_a_state_from_before_any_training_begins_anew_in_the_same_program(from_file, tmp_path, world_size):
    handler = make_handler(8)
    state = copy.deepcopy(handler.state_dict())
    handler.save(tmp_path / "start.pt")
    runs = []
    for epochs in (2, 3, 2):
        if from_file:
            handler.load(tmp_path / "start.pt")
        else:
            handler.load_state_dict(state)
        assert (handler.num_steps, len(handler.history)) == (0, 0)
        assert handler.state_dict()["training"] is None
        handler.set_optimizer(torch.optim.Adam, lr=0.02)
        runs.append(without_times(handler.train(epochs)))
        assert handler.num_steps == epochs * -(-NUM_SAMPLES // (8 * world_size))
    assert runs[0] == runs[1][:2] == runs[2]


class NotesNumpy(Callback):
    """Adds what NumPy computes to the records, as the functions of scikit-learn do."""

    def on_epoch_end(self, handler, record):
        record["f1"] = np.float32(np.cos(record["epoch"]))


@ranks(1)
@pytest.mark.parametrize("kind", ["options", "LambdaLR", "CyclicLR", "SequentialLR"])
def test_numbers_of_numpy_are_saved_as_those_of_python(kind, tmp_path):
    def prepared(cut_at=None):
        handler = make_handler(16)
        if kind == "options":
            handler.set_train_loader(regression(), batch_size=np.int64(16))
            options = {"weight_decay": np.float32(0.1), "amsgrad": np.True_}
            handler.set_optimizer(torch.optim.Adam, lr=np.logspace(-2, -1, 3)[1], **options)
            keeper = ModelCheckpoint(tmp_path / "kept", monitor="f1", mode="max")
            for callback in (NotesNumpy(), EarlyStopping("f1", mode="max", patience=2), keeper):
                handler.add_callback(callback)
        schedules = torch.optim.lr_scheduler

        def cosine(optimizer):
            return schedules.LambdaLR(optimizer, lambda step: np.cos(step / 10))

        if kind == "LambdaLR":
            handler.set_scheduler(cosine, per="step")
        if kind == "CyclicLR":
            handler.set_scheduler(
                schedules.CyclicLR, base_lr=np.float32(0.01), max_lr=np.float64(0.1), cycle_momentum=False, per="step"
            )
        if kind == "SequentialLR":
            handler.set_scheduler(
                lambda one: schedules.SequentialLR(one, [schedules.ConstantLR(one), cosine(one)], milestones=[1])
            )
        if cut_at is not None:
            handler.add_callback(CutsOff(cut_at))
        return handler

    whole = prepared()
    whole.train(3)
    cut, resumed = prepared(cut_at=whole.num_steps - 1), prepared()
    cut.auto_save(tmp_path / "run", every_steps=whole.num_steps - 2)
    with pytest.raises(CutOffError):
        cut.train(3)
    resumed.auto_save(tmp_path / "run", on_change="error")
    resumed.train(3)
    assert_equal(resumed, whole)


@ranks(2)
def test_files_that_are_no_checkpoints(tmp_path, rank):
    handler = make_handler(8)
    before = weights_of(handler)
    with pytest.raises((FileNotFoundError, RankFailedError)):
        handler.load(tmp_path / "no.pt")
    if rank == 0:
        (tmp_path / "bad.pt").write_bytes(b"no checkpoint")
    DistributedManager().barrier()
    with pytest.raises((CheckpointError, RankFailedError), match=r"bad\.pt"):
        handler.load(tmp_path / "bad.pt")
    checkpoint.save(handler.module.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        CheckpointError, match=r"must hold what NNHandler.save\(\) wrote, but has no model, .* Begin with"
    ):
        handler.load(tmp_path / "weights.pt")
    other = NNHandler(nn.Linear, in_features=1, out_features=1)
    other.save(tmp_path / "other.pt")
    with pytest.raises(RuntimeError, match="Missing key"):
        handler.load(tmp_path / "other.pt")
    assert all(torch.equal(weights_of(handler)[name], value) for name, value in before.items())


@ranks(2)
def test_early_stopping_is_over_also_for_the_next_run(tmp_path):
    def prepared():
        handler = make_handler(8, lr=10.0)
        handler.set_val_loader(regression(), batch_size=8)
        handler.add_callback(EarlyStopping(patience=2, min_delta=1e9))
        handler.auto_save(tmp_path)
        return handler

    handler = prepared()
    assert len(handler.train(10)) == 3
    assert len(prepared().train(10)) == 3


@ranks(2)
def test_the_best_epoch_is_kept(tmp_path):
    handler = make_handler(8, lr=0.3)
    handler.set_val_loader(regression(), batch_size=8)
    keeper = ModelCheckpoint(tmp_path, keep=1)
    handler.add_callback(keeper)
    handler.train(6)
    best = handler.history.best("val_loss")
    path = keeper.folder.best()
    assert path is not None
    state = checkpoint.load(path)
    assert state["training"]["epoch"] == best + 1
    assert state["history"]["records"][-1]["val_loss"] == min(handler.history["val_loss"])
    other = make_handler(8, lr=0.3)
    other.set_val_loader(regression(), batch_size=8)
    other.load(path)
    assert other.validate()["loss"] == min(handler.history["val_loss"])
    other.train(6)
    assert other.history["val_loss"] == handler.history["val_loss"]


class Scores(Callback):
    def __init__(self, scores):
        self.scores = scores

    def on_epoch_end(self, handler, record):
        record["score"] = self.scores[int(record["epoch"])]


@ranks(2)
@pytest.mark.parametrize("seed", range(2))
def test_the_best_few_are_kept_over_a_resumption(seed, tmp_path):
    drawn = random.Random(seed)  # noqa: S311 - a test
    scores = [drawn.choice([0.1, 0.2, 0.3, 0.4, 0.5, math.nan]) for _ in range(9)]
    num_best, mode = drawn.choice([1, 2, 4]), drawn.choice(["min", "max"])

    def train(epochs):
        handler = make_handler(64)
        keeper = ModelCheckpoint(tmp_path, monitor="score", mode=mode, keep=2, num_best=num_best)
        handler.add_callback(Scores(scores))
        handler.add_callback(keeper)
        latest = keeper.folder.latest()
        if latest is not None:
            handler.load(latest)
        handler.train(epochs)
        return keeper

    train(drawn.randrange(1, 9))
    keeper = train(9)
    given = [(score, epoch + 1) for epoch, score in enumerate(scores) if not math.isnan(score)]
    ranked = sorted(given, key=lambda one: one[0] if mode == "min" else -one[0])[:num_best]
    assert [*keeper.best.items()] == [(step, score) for score, step in ranked]
    kept = {step for _, step in ranked} | {8, 9}
    assert {path.name for path in tmp_path.glob("checkpoint-*.pt")} == {f"checkpoint-{step:08d}.pt" for step in kept}
    assert keeper.folder.best() == (tmp_path / f"checkpoint-{ranked[0][1]:08d}.pt" if ranked else None)


def test_a_number_of_best_checkpoints_must_be_one(tmp_path):
    with pytest.raises(ValueError, match="num_best must be at least 1, got 0"):
        ModelCheckpoint(tmp_path, num_best=0)
    with pytest.raises(TypeError, match="num_best must be a whole number, got 'all'"):
        ModelCheckpoint(tmp_path, num_best="all")


def test_the_log_says_what_a_training_resumes_from_if_the_latest_checkpoint_is_damaged(tmp_path, caplog):
    handler = make_handler(8)
    handler.auto_save(tmp_path, every_steps=1)
    handler.add_callback(CutsOff(3))
    with pytest.raises(CutOffError):
        handler.train(1)
    CheckpointFolder(tmp_path).wait()
    (tmp_path / "latest.pt").write_bytes(b"damaged")
    caplog.set_level(logging.INFO)
    resumed = make_handler(8)
    resumed.auto_save(tmp_path)
    resumed.train(1)
    assert f"resuming from step 1, saved in {tmp_path}" in caplog.messages


@ranks(2)
def test_data_that_changed_begins_the_epoch_anew(tmp_path):
    handler = make_handler(8)
    handler.auto_save(tmp_path, every_steps=3)
    handler.add_callback(CutsOff(4))
    with pytest.raises(CutOffError):
        handler.train(1)
    inputs, targets = regression().tensors
    resumed = make_handler(8, data=TensorDataset(inputs[:40], targets[:40]))
    resumed.auto_save(tmp_path)
    resumed.train(2)
    assert resumed.num_steps == 3 + 3 + 3


@ranks(1, 2)
def test_a_short_last_window_of_batches_of_ones_own_is_not_repeated(tmp_path):
    def prepared(cut_at=None):
        handler = make_handler(1)
        handler.set_train_loader(DataLoader(regression(), batch_size=22))
        handler.auto_save(tmp_path / str(cut_at), every_steps=1)
        if cut_at is not None:
            handler.add_callback(CutsOff(cut_at))
        return handler

    whole = prepared()
    whole.train(2, accumulate=2)
    with pytest.raises(CutOffError):
        prepared(cut_at=3).train(2, accumulate=2)
    resumed = prepared()
    resumed.auto_save(tmp_path / "3", every_steps=1)
    resumed.train(2, accumulate=2)
    assert resumed.num_steps == whole.num_steps == 4
    assert_equal(resumed, whole)


@ranks(2)
@pytest.mark.parametrize("has_own_batches", [False, True])
def test_a_training_goes_on_after_any_step_of_any_window(has_own_batches, rank, world_size, tmp_path):
    """The last window of an epoch has fewer batches: all have been read when its step is taken."""
    inputs, targets = regression().tensors
    mine = TensorDataset(inputs[rank::world_size], targets[rank::world_size])

    def prepared():
        handler = make_handler(8)  # of five batches
        if has_own_batches:
            handler.set_train_loader(DataLoader(mine, batch_size=8))  # of which rank 1 has four
        return handler

    whole = prepared()
    for step in range(1, 5):
        whole.add_callback(SavesAt(tmp_path / f"{step}.pt", step))
    whole.train(2, accumulate=3)
    assert whole.num_steps == 4
    for step in range(1, 5):
        resumed = prepared()
        resumed.load(tmp_path / f"{step}.pt")
        resumed.train(2, accumulate=3)
        assert_equal(resumed, whole)


@ranks(2)
def test_fine_tuning_goes_on_from_its_own_checkpoints(tmp_path):
    trained = make_handler(8)
    trained.add_callback(EarlyStopping("loss", patience=1, min_delta=1e9))
    trained.train(10)
    trained.save(tmp_path / "trained.pt")

    def tune():
        handler = NNHandler(Network, dtype=torch.float64)
        handler.load(tmp_path / "trained.pt")
        assert handler.num_steps == trained.num_steps
        handler.set_optimizer(torch.optim.Adam, lr=0.02)
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(regression(), batch_size=8, seed=1)
        handler.auto_save(tmp_path / "tuned")
        return handler

    first = tune()
    epochs = []
    first.add_callback(Epochs(epochs))
    first.train(4)
    second = tune()
    second.add_callback(Epochs(epochs))
    second.train(6)
    assert epochs == [2, 3, 4, 5]


class Epochs(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_begin(self, handler, epoch):
        self.epochs.append(epoch)


@ranks(2)
def test_a_refused_position_can_be_corrected(tmp_path):
    handler = make_handler(8)
    handler.train(1)
    handler.save(tmp_path / "saved.pt")
    other = make_handler(8)
    other.load(tmp_path / "saved.pt")
    other.set_train_loader(regression(), batch_size=8, seed=5)
    with pytest.raises(ValueError, match="seed must be 1, as saved, got 5"):
        other.train(3)
    other.set_train_loader(regression(), batch_size=8)
    assert other.train(3)["loss"] == pytest.approx(reference(3)[0], rel=1e-10)


class WishesToStop(Callback):
    def on_step_end(self, handler, step):
        if step == 2 and DistributedManager().rank == DistributedManager().world_size - 1:
            handler.stop("seen enough")


@ranks(2)
def test_a_wish_to_stop_survives_a_kill_and_leaves_the_epoch_whole(tmp_path):
    handler = make_handler(8)
    handler.add_callback(WishesToStop())
    handler.add_callback(CutsOff(4))
    handler.auto_save(tmp_path, every_steps=1)
    with pytest.raises(CutOffError):
        handler.train(5)
    resumed = make_handler(8)
    resumed.auto_save(tmp_path, every_steps=1)
    assert resumed.train(5)["loss"] == pytest.approx(reference(1)[0], rel=1e-10)


class Remembers(nn.Module):
    """A model that reads in training what it has seen on this rank, as contrastive learning does."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.register_buffer("queue", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs):
        outputs = self.last(inputs) + self.queue.mean()
        if self.training:
            self.queue = torch.cat([self.queue[1:], inputs.mean().reshape(1)])
        return outputs


@ranks(1, 2)
def test_validating_saving_and_resuming_leave_a_training_as_it_is(tmp_path):
    """Its buffers, which differ between the ranks, and the number of times that its loss is called."""
    num_calls = 0

    def loss_fn(outputs, targets):
        nonlocal num_calls
        num_calls += torch.is_grad_enabled()
        return nn.functional.mse_loss(outputs, targets)

    def prepared():
        handler = NNHandler(Remembers, seed=1)
        handler.set_optimizer(torch.optim.Adam, lr=0.02)
        handler.set_loss_fn(loss_fn)
        handler.set_train_loader(regression(), batch_size=8)
        return handler

    undisturbed = prepared()
    undisturbed.train(3)
    num_calls = 0
    for step in (4, None):
        handler = prepared()
        handler.set_val_loader(regression(), batch_size=8)
        handler.auto_save(tmp_path, every_steps=4)
        if step is not None:
            handler.add_callback(CutsOff(step + 1))
            with pytest.raises(CutOffError):
                handler.train(3)
        else:
            handler.train(3)
    assert handler.history["loss"] == undisturbed.history["loss"]
    assert torch.equal(handler.module.queue, undisturbed.module.queue)
    assert num_calls == undisturbed.num_steps + 1  # of the step that was cut off


class Freezes(Callback):
    """Freezes the statistics of a norm from the second epoch on, as detectors do."""

    def on_epoch_begin(self, handler, epoch):
        handler.module.norm.train(mode=epoch == 0)


@ranks(2)
@pytest.mark.parametrize(("cut_at", "strategy"), [(6, "ddp"), (9, "fsdp")])
def test_statistics_that_a_program_has_frozen_are_those_of_each_rank(cut_at, strategy, world_size, tmp_path):
    def prepared(cut_at=None):
        handler = NNHandler(Normed, seed=1, strategy=strategy)
        handler.set_optimizer(torch.optim.Adam, lr=0.02)
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(regression(num_samples=60), batch_size=16 // world_size)
        handler.add_callback(Freezes())
        if cut_at is not None:
            handler.add_callback(CutsOff(cut_at))
        return handler

    whole = prepared()
    whole.train(3, ema_decay=0.9)
    cut, resumed = prepared(cut_at), prepared()
    cut.auto_save(tmp_path, every_steps=cut_at - 1)
    with pytest.raises(CutOffError):
        cut.train(3, ema_decay=0.9)
    resumed.auto_save(tmp_path)
    resumed.train(3, ema_decay=0.9)
    assert_equal(resumed, whole)


@ranks(1, 2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("keeps", ["auto_save", "callback"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(keeps, sharded, tmp_path, rank):
    if rank == 0:
        (tmp_path / "file").write_text("in the way")
    DistributedManager().barrier()
    handler = make_handler(8)
    if keeps == "auto_save":
        handler.auto_save(tmp_path / "file" / "run", sharded=sharded)
    else:
        handler.add_callback(ModelCheckpoint(tmp_path / "file" / "run", monitor="loss", sharded=sharded))
    with pytest.raises((OSError, RankFailedError), match=r"file"):
        handler.train(1)
    assert handler.num_steps == 0


@ranks(1, 2)
def test_trying_a_folder_leaves_nothing_in_it(tmp_path, rank):
    handler = make_handler(8)
    handler.auto_save(tmp_path / "run")
    handler.add_callback(WatchesAFolder(tmp_path / "run"))
    handler.train(1)
    if rank == 0:
        assert {path.suffix for path in (tmp_path / "run").iterdir()} == {".pt"}


class WatchesAFolder(Callback):
    def __init__(self, folder):
        self.folder = folder

    @on_rank(0)
    def on_epoch_begin(self, handler, epoch):
        assert [*self.folder.iterdir()] == []
