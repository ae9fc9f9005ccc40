"""A program of several phases resumes within the one it was in; one that has changed is told in what."""

import logging
import random

import pytest
import torch
from torch import nn

from distman.checkpoint import save
from distman.errors import CheckpointError
from distman.handler import NNHandler, Stepper
from distman.testing import ranks

from .problems import Network, make_handler, regression
from .test_resumption import CutOffError, CutsOff, assert_equal, without_times

PER_EPOCH = 5  # steps, of all ranks together


def phases(seed):
    """Draw what a program of several phases does in each."""
    pick = random.Random(seed)  # noqa: S311 - no secret
    drawn, epochs = [], 0
    for _ in range(pick.choice([2, 3])):
        epochs += pick.choice([1, 2])
        drawn.append(
            {
                "frozen": pick.choice(["first", "second", None]),
                "optimizer": pick.choice([torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad]),
                "lr": pick.choice([0.01, 0.05]),
                "groups": pick.choice([1, 2]),
                "scheduler": pick.choice([None, "step", "epoch"]),
                "options": {"epochs": epochs, "ema_decay": pick.choice([None, 0.9]), "accumulate": pick.choice([1, 2])},
            }
        )
    return drawn


def prepare(handler, phase):
    for name, part in handler.module.named_children():
        part.requires_grad_(name != phase["frozen"])
    parts = [part for part in handler.module.children() if [*part.parameters()]]
    groups = [{"params": part.parameters()} for part in parts] if phase["groups"] == 2 else None
    handler.set_optimizer(phase["optimizer"], parameters=groups and (lambda _: groups), lr=phase["lr"])
    if phase["scheduler"] is not None:
        handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9, per=phase["scheduler"])


def program(drawn, world_size, folder=None, cut_at=None, strategy="ddp"):
    """Run the phases; return the handler, and what the program saw after each."""
    handler = make_handler(16 // world_size, dropout=0.3, strategy=strategy)
    if folder is not None:
        handler.auto_save(folder, every_steps=None if cut_at is None else cut_at - 1)
    if cut_at is not None:
        handler.add_callback(CutsOff(cut_at))
    seen = []
    for phase in drawn:
        prepare(handler, phase)
        history = handler.train(**phase["options"])
        seen.append((handler.num_steps, without_times(history)))
    return handler, seen


@ranks(2)
@pytest.mark.parametrize("seed", [0, 2, 5])  # which draw each optimizer, schedule and freezing
def test_a_program_resumes_in_the_phase_that_it_was_in(seed, world_size, tmp_path):
    drawn = phases(seed)
    whole, expected = program(drawn, world_size)
    cut_at = random.Random(seed).randrange(2, whole.num_steps + 1)  # noqa: S311 - no secret
    with pytest.raises(CutOffError):
        program(drawn, world_size, tmp_path, cut_at)
    resumed, seen = program(drawn, world_size, tmp_path)
    assert seen == expected
    assert_equal(resumed, whole)
    assert (resumed.ema_module is None) == (whole.ema_module is None)
    for one, other in zip(
        (resumed.ema_module or nn.Identity()).parameters(),
        (whole.ema_module or nn.Identity()).parameters(),
        strict=True,
    ):
        assert torch.equal(one, other)


@ranks(2)
def test_phases_of_a_sharded_model(world_size, tmp_path):
    drawn = phases(1)
    whole, _ = program(drawn, world_size, strategy="fsdp")
    with pytest.raises(CutOffError):
        program(drawn, world_size, tmp_path, whole.num_steps - 1, strategy="fsdp")
    resumed, _ = program(drawn, world_size, tmp_path, strategy="fsdp")
    assert without_times(resumed.history) == without_times(whole.history)


@ranks(1)
def test_phases_may_have_folders_of_their_own(tmp_path):
    def run(cut_at=None):
        handler = make_handler(16)
        if cut_at is not None:
            handler.add_callback(CutsOff(cut_at))
        handler.auto_save(tmp_path / "first")
        handler.train(1)
        handler.set_optimizer(torch.optim.SGD, lr=0.01)
        handler.auto_save(tmp_path / "second", every_steps=1)
        handler.train(3)
        return handler

    with pytest.raises(CutOffError):
        run(cut_at=9)
    resumed = run()
    whole = make_handler(16)
    whole.train(1)
    whole.set_optimizer(torch.optim.SGD, lr=0.01)
    whole.train(3)
    assert_equal(resumed, whole)


class Unfreezes(CutsOff):
    """Trains the first layer from the second epoch on, as a callback does it."""

    def on_epoch_begin(self, handler, epoch):
        if epoch == 1:
            handler.module.first.requires_grad_(requires_grad=True)


@ranks(2)
def test_what_a_callback_has_unfrozen_is_trained_on_all_ranks_and_after_a_resumption(world_size, tmp_path):
    def run(folder, cut_at):
        handler = make_handler(16 // world_size)
        handler.module.first.requires_grad_(requires_grad=False)
        handler.add_callback(Unfreezes(cut_at))
        handler.auto_save(folder, every_steps=11)
        before = handler.module.first.weight.clone()
        handler.train(3)
        assert not torch.equal(before, handler.module.first.weight)
        return handler

    whole = run(tmp_path / "whole", 0)
    with pytest.raises(CutOffError):
        run(tmp_path / "cut", 12)
    assert_equal(run(tmp_path / "cut", 0), whole)


def sequence(optimizer, length):
    parts = [
        torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=1),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


def changed(tmp_path, *, change, on_change=None, epochs=3):
    """Train two epochs, then go on with a program that has changed."""

    def make(**options):
        handler = NNHandler(Network, seed=1)
        handler.set_optimizer(options.get("optimizer", torch.optim.SGD), **{"lr": 0.1, **options.get("given", {})})
        if "schedule" in options:
            handler.set_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=options["schedule"])
        if "sequence" in options:
            handler.set_scheduler(sequence, length=options["sequence"])
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(regression(), batch_size=options.get("batch_size", 16))
        return handler

    first = make(**{name: 4 for name in ("schedule", "sequence") if name in change})
    first.auto_save(tmp_path)
    first.train(2)
    second = make(**change)
    second.auto_save(tmp_path, on_change=on_change)
    second.train(epochs)
    return second


CHANGES = {
    "the optimizer lr: 0.1 in the file, 0.01 in the program": {"given": {"lr": 0.01}},
    "the optimizer weight_decay: 0 in the file, 0.5 in the program": {"given": {"weight_decay": 0.5}},
    "the scheduler T_max: 4 in the file, 8 in the program": {"schedule": 8},
    "the scheduler _schedulers 1 T_max: 4 in the file, 8 in the program": {"sequence": 8},
    "batch_size: 16 in the file, 8 in the program, whose batches are used": {"batch_size": 8},
}


@pytest.mark.parametrize("told", CHANGES)
def test_a_changed_program_is_told_once_and_goes_on_as_in_the_file_or_as_it_says(told, tmp_path, caplog):
    handler = changed(tmp_path / "file", change=CHANGES[told])
    warnings = [one.getMessage() for one in caplog.records if "the program has changed" in one.getMessage()]
    assert len(warnings) == 1
    assert told in warnings[0]
    group = handler.optimizer.param_groups[0]
    if "initial_lr" not in group:
        assert (group["lr"], group["weight_decay"]) == (0.1, 0)
    with pytest.raises(CheckpointError, match=told):
        changed(tmp_path / "error", change=CHANGES[told], on_change="error")
    handler = changed(tmp_path / "program", change=CHANGES[told], on_change="program")
    group = handler.optimizer.param_groups[0]
    for name, value in CHANGES[told].get("given", {}).items():
        assert group[name] == value
    if group.keys() & {"initial_lr"}:
        state = handler._setup.schedulings["optimizer"].scheduler.state_dict()
        assert state.get("_schedulers", [None, state])[1]["T_max"] == 8
        assert state["last_epoch"] == 3


def test_a_program_that_has_not_changed_is_told_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    changed(tmp_path, change={"schedule": 4})
    assert "has changed" not in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer": torch.optim.AdamW}, "the class of the optimizer must be as saved, sgd.SGD, got adamw.AdamW"),
        (
            {"given": {"name": "other"}},
            "the names of the optimizers must be as saved, optimizer, got other",
        ),
        (
            {"given": {"parameters": lambda model: model.first.parameters()}},
            "the parameters of the optimizer must be as saved, .*second.*, got",
        ),
    ],
)
def test_another_optimizer_is_an_error_unless_the_program_counts(change, told, tmp_path):
    for on_change in (None, "file", "error"):
        with pytest.raises(CheckpointError, match=told):
            changed(tmp_path / str(on_change), change=change, on_change=on_change)
    handler = changed(tmp_path / "program", change=change, on_change="program")
    assert (len(handler.history), handler.num_steps) == (3, 15)


def test_a_phase_that_has_become_longer_is_gone_on_with(tmp_path):
    handler = make_handler(16)
    handler.auto_save(tmp_path)
    handler.train(1)
    handler.train(2)
    longer = make_handler(16)
    longer.auto_save(tmp_path)
    assert len(longer.train(4)) == 4


def test_another_value_for_on_change_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_change must be one of file, program, error, None, got 'both'"):
        make_handler(8).auto_save(tmp_path, on_change="both")


@ranks(1, 2)
def test_a_stepper_compares_its_optimizers_too():
    def make(kind, **options):
        torch.manual_seed(1)
        model = Network()
        return Stepper(model, kind(model.parameters(), **options))

    state = make(torch.optim.SGD, lr=0.1).state_dict()
    with pytest.raises(CheckpointError, match="the class of the optimizer must be as saved"):
        make(torch.optim.AdamW).load_state_dict(state)
    other = make(torch.optim.SGD, lr=0.2)
    other.load_state_dict(state)
    assert other.optimizers["optimizer"].param_groups[0]["lr"] == 0.1
    other = make(torch.optim.SGD, lr=0.2)
    other.load_state_dict(state, on_change="program")
    assert other.optimizers["optimizer"].param_groups[0]["lr"] == 0.2


TOLD_OF_FROZEN = "frozen parameters: nothing in the file, first.weight, first.bias in the program"


@pytest.mark.parametrize("on_change", [None, "file", "program", "error"])
@pytest.mark.parametrize("kind", ["stepper", "handler", "untrained handler"])
def test_what_is_frozen_is_compared_wherever_a_state_is_loaded(kind, on_change, caplog, tmp_path):
    def make(*, freezes):
        if kind == "stepper":
            torch.manual_seed(1)
            one = Stepper(model := Network(), torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            one = make_handler(8)
        one.module.first.requires_grad_(not freezes)
        return one

    def go_on(one):
        if kind == "stepper":
            one.load_state_dict(torch.load(tmp_path / "saved.pt"), on_change=on_change)
            for inputs, targets in one.batches([regression().tensors]):
                one.backward(nn.functional.mse_loss(one.module(inputs), targets))
                one.step()
        else:
            one.load(tmp_path / "saved.pt", on_change=on_change)
            one.train(2)

    first = make(freezes=False)
    if kind == "handler":
        first.train(1)
    if kind != "stepper":
        first.save(tmp_path / "saved.pt")
    else:
        save(first.state_dict(), tmp_path / "saved.pt")
    second = make(freezes=True)
    if on_change == "error":
        with pytest.raises(CheckpointError, match=TOLD_OF_FROZEN):
            go_on(second)
        return
    go_on(second)
    assert TOLD_OF_FROZEN in caplog.text
    assert torch.equal(second.module.first.weight, first.module.first.weight) == (on_change == "program")


def test_a_state_that_is_loaded_as_a_mapping_is_compared_too(caplog):
    first, second = make_handler(8), make_handler(8)
    second.module.first.requires_grad_(requires_grad=False)
    second.load_state_dict(first.state_dict())
    second.train(1)
    assert TOLD_OF_FROZEN in caplog.text
