"""Every name of NNHandler: each is there or says what to write instead, and does what it did."""

import inspect
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import distman
from distman._base import process_state as _process_state
from distman._torch_internals import tree_leaves, tree_structure
from distman.compat import nnhandler
from distman.compat.nnhandler import (
    Callback,
    DataLoaderType,
    EarlyStopping,
    EpochTimer,
    LoggingMode,
    ModelCheckpoint,
    ModelType,
    NNHandler,
    ParameterNormMonitor,
    ParamScheduler,
    Sampler,
    TensorBoardLogger,
    WandbLogger,
    _ddp,
    _names,
    _resolve_device,
    aggregate_loss,
    aggregate_metrics,
    broadcast_data,
    broadcast_if_ddp,
    broadcast_tensor,
    denoising_score_matching,
    initialize_ddp,
    initialize_logger,
    make_train_val_indices,
    on_rank,
)
from distman.errors import CheckpointError
from distman.score import VarianceExploding
from distman.testing import fake_environment, ranks
from tests.compat.nnhandler_names import METHODS, PUBLIC
from tests.compat.problems import Net, OwnSde, Shift


@pytest.mark.parametrize("module", PUBLIC)
def test_all_names_are_there_or_say_what_to_write(module):
    for name in PUBLIC[module].split():
        if name in _names.REFUSED:
            with pytest.raises(ImportError, match=r" is not here\. .+\.$"):
                exec(f"from distman.compat.nnhandler import {name}")  # noqa: S102 - an import whose name varies
            with pytest.raises(AttributeError, match=f"{name} of NNHandler is not here"):
                getattr(nnhandler, name)
        else:
            assert getattr(nnhandler, name) is not None


def test_nothing_is_refused_that_is_there_or_that_nobody_knows():
    known = {name for names in PUBLIC.values() for name in names.split()} | {"SummaryWriter"}
    assert _names.REFUSED.keys() <= known
    assert not _names.REFUSED.keys() & set(nnhandler.__all__)
    assert _names.REFUSED_METHODS.keys() <= set(METHODS.split())
    with pytest.raises(AttributeError, match="has no attribute 'on_rnak'"):
        nnhandler.on_rnak  # noqa: B018 - it raises


def data(length=12):
    x = torch.linspace(-1, 1, 2 * length).reshape(length, 2)
    return TensorDataset(x, x.sum(1, keepdim=True))


def make(**options):
    handler = NNHandler(Net, model_type="regression", width=3, **options)
    handler.seed = 0
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(torch.nn.functional.mse_loss)
    handler.set_train_loader(data(), batch_size=3, shuffle=False)
    handler.set_val_loader(data(), batch_size=4)
    return handler


@ranks(1)
def test_all_methods_are_there_or_say_what_to_write():
    handler = make()
    for name in METHODS.split():
        if name in _names.REFUSED_METHODS:
            with pytest.raises(AttributeError, match=f"{name} is not here. "):
                getattr(handler, name)
        else:
            assert hasattr(handler, name), name
    assert handler.inner is handler.module.inner
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        handler.nothing  # noqa: B018 - it raises


class Journal(Callback):
    """Notes its events."""

    def __init__(self):
        super().__init__()
        self.events = []

    def state_dict(self):
        return {"num": len(self.events)}

    def load_state_dict(self, state_dict):
        self.events = [("earlier", state_dict["num"])]


for event in [name for name in vars(Callback) if name.startswith("on_")]:

    def note(self, *, event=event, logs=None, **kwargs):
        self.events.append((event, {**(logs or {}), **kwargs, "rank": self.handler._rank}))

    setattr(Journal, event, note)


@ranks(1, 2)
def test_training_and_its_events(world_size, tmp_path):
    handler = make()
    journal = Journal()
    handler.add_callback(journal)
    handler.add_callback(EpochTimer())
    handler.add_callback(ParameterNormMonitor())
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
    handler.auto_save(2, save_path=str(tmp_path), name="model_{epoch:02d}_{val_loss:.0f}", overwrite=True)
    handler.train(epochs=3, validate_every=2, gradient_accumulation_steps=2, progress_bar=False)
    names = [name for name, _ in journal.events]
    num_batches = math.ceil(12 / (3 * world_size))
    batch = ["on_train_batch_begin", "on_train_batch_end"]
    if num_batches == 4:
        assert names[1:10] == ["on_epoch_begin", *batch * 4]
    validation = ["on_val_begin", *["on_val_batch_begin", "on_val_batch_end"] * (3 - (world_size - 1)), "on_val_end"]
    if world_size == 1:
        assert names[11 + 9 : 11 + 9 + len(validation)] == validation
    assert (names[0], names[-1]) == ("on_train_begin", "on_train_end")
    assert names.count("on_val_end") == 1
    assert names.count("on_train_batch_end") == 3 * num_batches
    begun = journal.events[0][1]
    assert {**begun, "rank": 0} == {"start_epoch": 0, "total_epochs": 3, "world_size": world_size, "rank": 0}
    ends = [logs for name, logs in journal.events if name == "on_epoch_end"]
    assert [logs["epoch"] for logs in ends] == [0, 1, 2], "the argument; that of the logs is one more"
    assert math.isnan(ends[0]["val_loss"])
    assert ends[1]["val_loss"] == handler.val_losses[1]
    assert ends[2]["loss"] == handler.train_losses[2] < handler.train_losses[0]
    assert ends[0]["error"] == handler.train_metrics_history["error"][0]
    assert ends[0]["lr"] == ends[0]["lr_group_0"] == 0.1
    batches = [logs for name, logs in journal.events if name == "on_train_batch_end"]
    assert {logs["size"] for logs in batches} == {3}
    assert all(math.isfinite(logs["loss"]) and math.isfinite(logs["error"]) for logs in batches)
    distman.DistributedManager().barrier()  # rank 0 alone removes what was saved before
    assert [path.name for path in tmp_path.iterdir()] == ["model_03_nan.pth"]

    handler.train(epochs=1, ema_decay=0.5)
    assert len(handler.train_losses) == 4, "so many more"
    for one, other in zip(handler.module.parameters(), handler.ema.parameters(), strict=True):
        assert torch.equal(one, other)


@ranks(2)
def test_same_numbers_as_distmans_handler():
    theirs = make()
    ours = distman.handler.NNHandler(lambda: Net(width=3))
    ours.module.load_state_dict(theirs.module.state_dict())
    ours.set_optimizer(torch.optim.SGD, lr=0.1)
    ours.set_loss_fn(torch.nn.functional.mse_loss)
    ours.set_train_loader(data(), batch_size=3, shuffle=False)
    ours.set_val_loader(data(), batch_size=4)
    ours.train(2)
    theirs.train(2)
    assert (theirs.train_losses, theirs.val_losses) == (ours.history["loss"], ours.history["val_loss"])


@ranks(2)
def test_calls_of_the_model(rank):
    handler = make()
    with pytest.raises(distman.DistmanError, match=r"Call the bare module, handler\.module"):
        handler.model(torch.ones(1, 2))
    handler.eval()
    if rank == 0:
        assert torch.equal(handler.model(torch.ones(1, 2)), handler(torch.ones(1, 2)))
    handler.eval(activate=False)
    assert handler.model.module is handler.module


@ranks(1)
def test_options_of_the_training(tmp_path):
    handler = make(logger_mode=LoggingMode.FILE, logger_filename=str(tmp_path / "log" / "nn.log"))
    seen = []

    def loss(outputs, targets, scale, epoch):
        seen.append(epoch)
        return (outputs - targets).square().mean() * scale, torch.zeros(3)

    class Halves:
        def get_value(self, epoch):
            return 0.5**epoch

    handler.set_loss_fn(loss, pass_epoch_to_loss=True, scale=2.0)
    handler.freeze_module(handler.module.inner)
    handler.keep_eval_on_module(handler.module.drop)
    frozen = handler.module.inner.weight.clone()
    handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    handler.set_optimizer(torch.optim.SGD, lr=0.2)
    assert handler.scheduler.optimizer is handler.optimizer, "made again"

    class Modes(Callback):
        def on_train_batch_end(self, batch, logs=None):
            modes.append((self.handler.module.drop.training, self.handler.module.outer.training))

    modes = []
    handler.add_callback(Modes())
    handler.add_callback(ParamScheduler("noise", Halves(), verbose=1))
    handler.train(2, validate_every=0, gradient_clipping_norm=1.0, seed=3)
    assert handler.seed == 3
    assert sorted(set(seen)) == [0, 1]
    assert set(modes) == {(False, True)}
    assert torch.equal(handler.module.inner.weight, frozen)
    assert handler.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert handler.module.noise == 0.5
    assert all(map(math.isnan, handler.val_losses))
    handler.keep_eval_on_module(handler.module.drop, activate=False)
    assert handler.module.drop.training
    handler.set_scheduler(None)
    handler.eval()
    assert handler.scheduler is None
    text = (tmp_path / "log" / "nn.log").read_text()
    assert "noise is 0.5" in text
    assert "epoch 2/2: loss" in text
    assert "Net (regression)" in str(handler)
    assert handler.count_parameters() == 4 < handler.count_parameters(trainable_only=False)
    handler.logger.handlers.clear()


@ranks(2)
def test_curves_are_written(rank, tmp_path):
    handler = make()
    handler.add_callback(TensorBoardLogger(str(tmp_path), comment="first"))
    handler.train(2)
    if rank == 0:
        events = EventAccumulator(str(tmp_path / "first"))
        events.Reload()
        assert [event.value for event in events.Scalars("epoch/loss")] == pytest.approx(handler.train_losses)
    assert WandbLogger("mine", run_name="first", config={"lr": 0.1}).tracker.run == "first"


@ranks(1, 2)
def test_early_stopping_and_checkpoints(tmp_path):
    handler = make()
    handler.add_metric("constant", lambda *_: 1.0)
    stopping = EarlyStopping("val_constant", patience=2, mode="max", restore_best_weights=True)
    handler.add_callback(stopping)
    handler.add_callback(ModelCheckpoint(str(tmp_path / "best_{epoch:02d}"), monitor="loss", save_weights_only=True))
    handler.add_callback(ModelCheckpoint(str(tmp_path / "all.pth"), save_best_only=False, save_freq=2))
    handler.train(10)
    assert len(handler.train_losses) == stopping.stopped_epoch == 3
    assert handler._stop_training
    best = distman.checkpoint.load(tmp_path / "best_01.pth")
    for name, value in handler.module.state_dict().items():
        assert torch.equal(best[name], value), "the weights of the first epoch, the best of those that are all the same"
    again = NNHandler.load(str(tmp_path / "all.pth"))
    assert len(again.train_losses) == 2

    class OnOneRank(Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.handler._stop_training = self.handler._rank == 0

    handler.clear_callbacks()
    handler.add_callback(OnOneRank())
    handler.train(5)
    assert len(handler.train_losses) == 4


@ranks(2)
@pytest.mark.parametrize(
    ("interval", "saves_last", "saved"),
    [(-1, True, [3]), (-1, False, [3]), (2, True, [2, 3]), (2, False, [2]), (3, True, [3]), (0, True, [])],
)
def test_the_last_epoch_is_saved_also_where_a_callback_made_it_the_last(interval, saves_last, saved, tmp_path):
    class OnOneRank(Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.handler._stop_training = epoch == 2 and self.handler._rank == 0

    handler = make()
    handler.add_callback(OnOneRank())
    handler.auto_save(interval, save_path=str(tmp_path), name="{epoch}")
    handler.train(10, save_on_last_epoch=saves_last)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{epoch}.pth" for epoch in saved]
    for epoch in saved:
        assert len(NNHandler.load(str(tmp_path / f"{epoch}.pth")).train_losses) == epoch


@ranks(1, 2)
def test_the_best_weights_are_those_that_were_validated(tmp_path):
    handler = make()
    handler.add_metric("constant", lambda *_: 1.0)
    handler.add_callback(EarlyStopping("val_constant", patience=2, mode="max", restore_best_weights=True))
    handler.add_callback(ModelCheckpoint(str(tmp_path / "{epoch}"), save_best_only=False, save_weights_only=True))
    handler.train(10, ema_decay=0.9)
    assert len(handler.train_losses) == 3
    best = distman.checkpoint.load(tmp_path / "1.pth")
    for module in (handler.module, handler.ema):
        assert all(torch.equal(best[name], value) for name, value in module.state_dict().items())
    assert handler.distman.evaluate(data(), batch_size=4)["loss"] == pytest.approx(handler.val_losses[0])


@ranks(1, 2)
def test_a_loaded_handler_goes_on(tmp_path):
    path = str(tmp_path / "handler.pth")
    handler = make()
    handler.set_scheduler(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    handler.add_complimentary_kwargs(run="a7", function=len)
    handler.add_callback(Journal())
    handler.train(2, ema_decay=0.5)
    handler.save(path)
    num_events = len(handler.callbacks[0].events)
    handler.train(2, ema_decay=0.5)

    loaded = NNHandler.load(path, device="cpu", strict_load=True)
    assert loaded.model_kwargs == {"width": 3}
    assert loaded._model_type is ModelType.REGRESSION
    assert loaded.complimentary_kwargs == {"run": "a7"}
    with pytest.raises(distman.DistmanError, match=r"set_loss_fn\(\)"):
        loaded.train(1)
    loaded.set_loss_fn(torch.nn.functional.mse_loss)
    loaded.set_train_loader(data(), batch_size=3, shuffle=False)
    loaded.set_val_loader(data(), batch_size=4)
    journal = Journal()
    loaded.add_callback(journal)
    assert journal.events == [("earlier", num_events)]
    loaded.train(2, ema_decay=0.5)
    assert (loaded.train_losses, loaded.val_losses) == (handler.train_losses, handler.val_losses)
    assert loaded.optimizer.param_groups[0]["lr"] == handler.optimizer.param_groups[0]["lr"]
    assert journal.events[1][1]["start_epoch"] == 2

    anew = make()
    assert anew.load(path, skip_optimizer=True, skip_history=True, skip_ema=True, skip_callbacks=True) is anew
    assert anew.ema is None
    assert anew.train_losses == []
    anew.train(1)
    assert len(anew.train_losses) == 1
    without = NNHandler.load(path, skip_history=True, skip_scheduler=True)
    assert without.scheduler is None
    assert without.optimizer.param_groups[0]["lr"] == 0.05


@ranks(1, 2)
def test_plain_files(rank, tmp_path):
    handler = make()
    wrapped = {f"module.{name}": value + 1 for name, value in handler.module.state_dict().items()}
    expected = handler.module.outer.bias.item() + 1
    files = {
        "plain": wrapped,
        "with states": {
            "model_state_dict": wrapped,
            "optimizer_state_dict": torch.optim.SGD(Net(width=3).parameters(), lr=0.7).state_dict(),
            "train_losses": [3.0, 2.0],
            "val_losses": [3.0, math.nan],
        },
        "pickled": {"model_class": Net, "model_state_dict": wrapped},
        "other": {**wrapped, "module.more": torch.ones(1)},
    }
    paths = {name: str(tmp_path / f"{name}.pth") for name in files}

    @on_rank(0)
    def write():
        for name, state in files.items():
            torch.save(state, paths[name])

    write()
    assert make().load(paths["plain"]).module.outer.bias.item() == pytest.approx(expected)
    with pytest.raises(CheckpointError, match=r"does not say of which model.*initialize_from_checkpoint"):
        NNHandler.load(paths["plain"])
    for name in ("plain", "with states"):
        made = NNHandler.initialize_from_checkpoint(paths[name], Net, "regression", device="cpu", width=3)
        assert made.module.outer.bias.item() == pytest.approx(expected)
    loaded = make().load(paths["with states"])
    assert loaded.optimizer.param_groups[0]["lr"] == 0.7
    assert loaded.train_losses == [3.0, 2.0]
    journal = Journal()
    loaded.add_callback(journal)
    loaded.train(1)
    assert len(loaded.train_losses) == 3
    assert journal.events[0][1]["start_epoch"] == 2
    with pytest.raises(CheckpointError, match=r"torch.load\(path, weights_only=False\)"):
        make().load(paths["pickled"])
    if rank == 0:
        with pytest.warns(RuntimeWarning, match="the model lacks: ..*more"):
            make().load(paths["other"])
    else:
        make().load(paths["other"])
    with pytest.raises(RuntimeError, match="more"):
        make().load(paths["other"], strict_load=True)


class Destructive(Net):
    """The program has it, and makes no handler of it."""

    def __init__(self, path="", **arguments):
        super().__init__(**arguments)
        Path(path).unlink()


class OwnOptimizer(torch.optim.SGD):
    pass


def saved(path, made):
    """A file of a handler of the program's, in which somebody has changed how it was made."""
    handler = make()
    handler.set_scheduler(torch.optim.lr_scheduler.StepLR, step_size=2)
    handler.save(path)
    state = distman.checkpoint.load(path)
    for name, value in made.items():
        state["nnhandler"][name].update(value)
    distman.checkpoint.save(state, path)
    return str(path)


OF = {"module": __name__, "kwargs": {}}
NAMED_BY_A_FILE = {
    "a model": ("model", {**OF, "name": "Destructive", "kwargs": {"path": "kept"}}),
    "a model of a library": ("model", {"module": "torch.fx.graph_module", "name": "GraphModule", "kwargs": {}}),
    "a class within another": ("model", {"module": "torch", "name": "nn.Module", "kwargs": {}}),
    "no model": ("model", {"module": "builtins", "name": "open", "kwargs": {}}),
    "a module that is not imported": ("model", {"module": "antigravity", "name": "X", "kwargs": {}}),
    "an optimizer": ("optimizer", {**OF, "name": "OwnOptimizer", "kwargs": {"lr": 0.1}}),
    "no optimizer": ("optimizer", {"module": "torch.nn.modules.linear", "name": "Linear", "kwargs": {}}),
    "a scheduler": ("scheduler", {"module": "torch.optim.sgd", "name": "SGD", "kwargs": {}}),
}


@ranks(1)
@pytest.mark.parametrize(("part", "made"), NAMED_BY_A_FILE.values(), ids=NAMED_BY_A_FILE)
def test_a_class_that_only_a_file_names_is_not_called(part, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept"
    kept.touch()
    path = saved(tmp_path / "named.pth", {part: made})
    with pytest.raises(CheckpointError, match=rf"{made['name']} must be a class of \w+ that this program has used"):
        NNHandler.load(path)
    assert kept.exists()
    assert "antigravity" not in sys.modules


@ranks(1)
def test_a_file_names_what_the_program_lists_or_has_used(tmp_path):
    path = saved(tmp_path / "named.pth", {"optimizer": {**OF, "name": "OwnOptimizer", "kwargs": {"lr": 0.1}}})
    loaded = NNHandler.load(path, classes=[OwnOptimizer])
    assert type(loaded.optimizer) is OwnOptimizer
    assert type(NNHandler.load(path).optimizer) is OwnOptimizer
    NNHandler(torch.nn.Linear, in_features=1, out_features=1).save(path)
    _process_state.reset()
    assert type(NNHandler.load(path).module) is torch.nn.Linear
    saved(tmp_path / "named.pth", {})
    _process_state.reset()
    with pytest.raises(CheckpointError, match=r"pass classes=\[...\] with this class to load\(\)"):
        NNHandler.load(path)
    assert type(NNHandler.load(path, classes=[Net]).module) is Net


@ranks(1)
@pytest.mark.parametrize("name", [one for one in inspect.signature(NNHandler).parameters if one != "model_kwargs"])
def test_a_file_has_no_arguments_for_the_handler(name, tmp_path, monkeypatch):
    """Among them is the name of a file to which it logs."""
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "named.pth", {"model": {"kwargs": {name: "x"}}})
    with pytest.raises(CheckpointError, match=rf"must be for the class that it names, got {name} for NNHandler"):
        NNHandler.load(path)
    assert [one.name for one in tmp_path.iterdir()] == ["named.pth"]


@ranks(1)
@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_a_file_has_no_arguments_for_the_calls_that_set_something(part, tmp_path):
    path = saved(tmp_path / "named.pth", {part: {"kwargs": {f"{part}_class": "x"}}})
    with pytest.raises(CheckpointError, match=rf"must be for the class that it names, got {part}_class for set_{part}"):
        NNHandler.load(path)


@ranks(1)
def test_batches_of_each_type_of_model():
    x = torch.ones(4, 2)
    handler = NNHandler(Net, model_type=ModelType.REGRESSION)
    handler.set_loss_fn(lambda outputs, targets: (outputs - targets).mean())
    handler.set_val_loader(TensorDataset(x, torch.zeros(4, 1), torch.full((4, 1), 5.0)), batch_size=2)
    with torch.no_grad():
        plain = handler(x).mean().item()
    assert handler.distman.validate()["loss"] == pytest.approx(plain + 5), (
        "what comes after the targets goes to forward()"
    )
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_train_loader(TensorDataset(x), batch_size=2)
    with pytest.raises(ValueError, match="must have inputs and targets, got 1 part"):
        handler.train(1)
    generative = NNHandler(torch.nn.Identity, model_type="generative")
    generative.set_loss_fn(torch.nn.functional.mse_loss)
    generative.set_val_loader(TensorDataset(x), batch_size=2)
    assert generative.distman.validate() == {"loss": 0.0}
    outputs = handler.predict(torch.utils.data.DataLoader(TensorDataset(x, x), batch_size=3))
    assert [len(one) for one in outputs] == [3, 1]


@ranks(1, 2)
@pytest.mark.parametrize("model_type", ["regression", "generative"])
def test_a_handler_without_a_loss_passes_the_model_what_it_takes(model_type, tmp_path, rank):
    path = str(tmp_path / "handler.pth")
    parts = [torch.full((4, 2), float(index)) for index in range(2 if model_type == "generative" else 3)]
    loader = DataLoader(TensorDataset(*parts), batch_size=3)
    made = NNHandler(Net, model_type=model_type)
    made.save(path)
    with torch.no_grad():
        expected = made(parts[0], parts[-1])
    for handler in (
        made,
        NNHandler.load(path),
        NNHandler.initialize_from_checkpoint(path, Net, model_type=model_type),
    ):
        predicted = handler.predict(loader)
        assert rank or torch.allclose(torch.cat(predicted), expected)


def rows(index):
    return torch.full((index % 3 + 1, 2), float(index))


PREDICTED = {
    "padded": lambda inputs: inputs,
    "of unlike sizes": lambda inputs: [rows(int(one[0, 0])) for one in inputs],
    "mappings": lambda inputs: [{"boxes": rows(int(one[0, 0])), "label": f"{one[0, 0]:g}"} for one in inputs],
    "a list of several": lambda inputs: [inputs, inputs.sum(1)],
    "of the whole batch": lambda inputs: {"mean": inputs.mean(), "number": len(inputs)},
}


@ranks(1, 3)
@pytest.mark.parametrize("kind", PREDICTED)
def test_predictions_are_what_the_model_returns_for_each_batch(kind, rank):
    class Model(torch.nn.Module):
        def forward(self, inputs):
            return PREDICTED[kind](inputs)

    handler = NNHandler(Model)
    for num_samples, size in ((6, 2), (7, 3), (2, 4), (0, 2)):
        loader = DataLoader(
            [rows(index) for index in range(num_samples)],
            batch_size=size,
            collate_fn=lambda samples: pad_sequence(samples, batch_first=True),
        )
        predicted = handler.predict(loader)
        assert (predicted is None) == (rank > 0)
        if rank == 0:
            expected = [Model()(inputs) for inputs in loader]
            assert tree_structure(predicted) == tree_structure(expected)
            for one, other in zip(tree_leaves(predicted), tree_leaves(expected), strict=True):
                assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


@ranks(1, 2)
def test_score_based_models(rank):
    handler = NNHandler(Shift, model_type="score_based")
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_train_loader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
    handler.set_loss_fn(denoising_score_matching)
    handler.add_metric("unused", lambda *_: 1 / 0)
    for sde, options in ((OwnSde, {}), (VarianceExploding, {"sigma_max": 2.0})):
        handler.set_sde(sde, **options)
        handler.train(1)
        assert math.isfinite(handler.train_losses[-1])
    x = torch.ones(3, 2)
    with torch.no_grad():
        weight = handler.module.weight.item()
        assert handler.score(1.0, x, 4.0)[0, 0].item() == pytest.approx((3 + weight) / 2, rel=1e-4)
    assert handler.sample((4, 2), steps=5).shape == (4, 2)
    torch.manual_seed(rank)
    guided = handler.sample(
        (5, 2), 4, condition=[torch.zeros(5, 1)], likelihood_score_fn=lambda _, x: -x, guidance_factor=0.5
    )
    assert torch.equal(broadcast_data(guided.clone()), guided), "the same on all ranks"
    with pytest.raises(TypeError, match=r"patch_size must be left out, got 8\. Call the network on patches"):
        handler.sample((4, 2), 5, patch_size=8)
    handler.set_sde(OwnSde)
    with pytest.raises(TypeError, match=r"sde must be an equation of distman\.score"):
        handler.sample((4, 2), 5)
    assert handler.score(1.0, x).shape == x.shape
    with pytest.raises(TypeError, match=r"must return outputs for a batch alone, .* Call score\(t, x\), sample\(\)"):
        handler.predict(DataLoader(TensorDataset(x)))

    class Twos(Sampler):
        def sample(self, N, device, **kwargs):  # noqa: N803 - its name there
            return torch.full((N,), self.value)

        def save(self):
            return {"value": self.value}

        def load(self, **state):
            self.value = state["value"]

    handler.set_sampler(Twos)
    handler.sampler.load(value=2.0)
    samples = handler.get_samples(3)
    assert samples is None if rank else samples.tolist() == [2.0] * 3


@ranks(1)
def test_arguments_that_are_refused(tmp_path):
    handler = make(ddp_kwargs={"find_unused_parameters": False})
    refused = [
        lambda: NNHandler(Net, save_model_code=True),
        lambda: NNHandler(Net, ddp_kwargs={"static_graph": True}),
        lambda: handler.train(1, debug_print_interval=3),
        lambda: handler.save(tmp_path / "x.pth", single_file=False),
        lambda: handler.plot_losses(),
        lambda: WandbLogger("mine", log_model_weights=True),
        lambda: WandbLogger("mine", log_freq_epoch=5),
    ]
    for call in refused:
        with pytest.raises(TypeError, match=r"must be (left out|given).* got .+\. [A-Z].+\.$"):
            call()
    with pytest.raises(TypeError, match=r"Derive it from distman.compat.nnhandler.Callback"):
        handler.add_callback(distman.handler.EarlyStopping())
    with pytest.raises(TypeError, match=r"model_class must be a class of torch\.nn\.Module"):
        NNHandler(Net())
    handler.device = "cpu"
    with pytest.raises(RuntimeError, match="device must stay cpu"):
        handler.device = "meta"


@ranks(1, 2, 3)
def test_helpers(rank, world_size, tmp_path):
    device, mean = torch.device("cuda:7"), (world_size - 1) / 2
    assert aggregate_metrics(metrics_dict={"a": rank}, world_size=world_size, device=device) == {"a": mean}
    assert aggregate_loss(loss_value=float(rank), world_size=world_size, device=device) == mean
    assert aggregate_loss(float(rank), 1, device) == rank
    last = world_size - 1
    own = torch.full((2,), float(rank))
    for broadcast in (broadcast_tensor, broadcast_if_ddp):
        own.fill_(rank)
        assert broadcast(own, src=last) is own
        assert own.tolist() == [last] * 2
    assert broadcast_if_ddp({"run": 3} if rank == 0 else None) == {"run": 3}
    assert broadcast_data(torch.ones(3) if rank == 0 else None).shape == (3,)
    assert broadcast_data(torch.ones(3 - min(rank, 1))).shape == (3,)

    @on_rank(rank=[0, last], barrier=True)
    def count():
        return rank

    assert count() == (rank if rank in (0, last) else None)

    @on_rank(0, check_exception=True)
    def fail():
        raise ValueError("no")

    with pytest.raises((RuntimeError, ValueError), match="no"):
        fail()
    train, val = make_train_val_indices(10, 0.3, save_path=str(tmp_path / "split.npz"))
    assert sorted([*train, *val]) == [*range(10)]
    assert len(val) == 3
    again = make_train_val_indices(10, 0.5, seed=2, save_path=str(tmp_path / "split.npz"))
    assert np.array_equal(train, again[0])


@ranks(1, 2)
def test_a_shard_in_memory():
    handler = make()
    handler.set_train_loader(data(), dataloader_type=DataLoaderType.RANK_CACHED, batch_size=3, num_workers=0)
    handler.train(1)
    assert handler.train_loader.batches is not None


@ranks(1, 2)
def test_initialized_already(rank):
    assert initialize_ddp() is None
    assert (initialize_logger("a name of its own") is None) == bool(rank)


def test_a_process_that_a_rank_has_started_is_alone(monkeypatch):
    _process_state.reset()  # another test of this process may have left a manager
    monkeypatch.setattr(_ddp, "is_started_by_rank", lambda _: True)
    for name, value in fake_environment("env", tasks=2)[0].items():
        monkeypatch.setenv(name, value)
    assert nnhandler._is_env_distributed()
    assert on_rank(1)(lambda: 7)() == 7
    assert broadcast_if_ddp(3) == 3
    assert not distman.DistributedManager.is_initialized()


def test_devices(monkeypatch):
    assert _resolve_device("cpu") == torch.device("cpu")
    assert _resolve_device("cuda").type in ("cuda", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.warns(RuntimeWarning, match="there is no device cuda:9"):
        assert _resolve_device("cuda:9") == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be a string such as"):
        _resolve_device("cuda:one")
    with pytest.raises(TypeError):
        _resolve_device(3)
