"""Trainings that are drawn at random, saved at any moment, cut off, and resumed: exact, or refused with the reason.

``python -m tests.handler.resumes --tries 500 --seed 1`` tries so many, and ``test_resumes.py`` some.
"""

import argparse
import collections
import dataclasses
import gc
import random
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import distman
from distman import DistributedManager, checkpoint
from distman.checkpoint import CheckpointFolder
from distman.collectives import all_gather_objects, broadcast_data
from distman.data import distributed_loader, distributed_stream
from distman.data._randomness import generators_state, set_generators_state
from distman.errors import DistmanError
from distman.handler import Callback, EarlyStopping, NNHandler, Stepper

from .problems import Rates

NUM_SAMPLES = 23
EVENTS = [name for name in vars(Callback) if name.startswith("on_") and name != "on_exception"]
OCCURRENCES = {"on_train_begin": 1, "on_train_end": 1, "on_step_end": 7, "on_step_records": 3, "steps": 7, "end": 12}
LOADERS = (
    *("dataset", "cached", "workers", "batches", "own generator", "batches in workers", "distributed sampler"),
    *("torchdata", "torchdata in workers", "torchdata sampler", "stream", "stream in workers", "positioned stream"),
    *("torchdata stream", "torchdata stream in workers", "workers that persist", "torchdata workers that persist"),
)
REFUSALS = (
    "must be saved between two steps",
    "a state must be taken in the last batch",
    "that is not. Leave",
    "which that state",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn."""

    loader: str
    event: str
    occurrence: int
    place: int
    cut_after: int
    step: str
    strategy: str
    average: float | None
    use_buffers: bool | None
    schedule: str
    accumulate: int
    validate: str
    limit_batches: int | None
    patience: int
    clip_norm: float | None


def draw(number):
    pick = random.Random(number)  # noqa: S311 - no secret
    step = pick.choice(["loss", "loss", "own", "loop"])
    within = [name for name in EVENTS if "batch" in name or "backward" in name or "before" in name]
    often = [*("on_step_end", "steps", "epochs"), *(name for name in EVENTS if name not in within)]
    event = pick.choice(["top", "middle", "end", "end", "end"] if step == "loop" else [*often, pick.choice(within)])
    validates = ["epochs", "steps"] if "validation" in event else ["never", "epochs", "steps"]
    return Case(
        loader=pick.choice(LOADERS),
        event=event,
        occurrence=pick.randint(1, OCCURRENCES.get(event, 2)),
        place=pick.randrange(4),
        cut_after=pick.randrange(3),
        step=step,
        strategy=pick.choice(["ddp", "ddp", "fsdp"]) if step == "loss" else "ddp",
        average=pick.choice([None, 0.8]),
        use_buffers=pick.choice([None, True, False]),
        schedule=pick.choice(["none", "step", "epoch", "plateau"]),
        accumulate=pick.choice([1, 1, 2, 3]),
        validate=pick.choice(validates),
        limit_batches=pick.choice([None, None, 2]),
        patience=100 if event == "on_train_end" else pick.choice([1, 2, 100, 100]),  # a stop is forgotten by load()
        clip_norm=pick.choice([None, 0.5]),
    )


class Augmented(Dataset):
    """A regression whose inputs are disturbed anew each time."""

    def __init__(self, *, is_random=True):
        self.inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(7))
        self.noise = 0.1 * is_random

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        own = self.inputs[index]
        return own + self.noise * torch.randn(4), own.sum(0, keepdim=True)


class Stream(IterableDataset):
    """The same in an order of its own."""

    def __init__(self, *, is_random=True):
        self.data, self.is_random = Augmented(), is_random

    def __iter__(self):
        for index in range(NUM_SAMPLES):
            inputs, targets = self.data[index]
            yield (inputs if self.is_random else self.data.inputs[index]), targets


class Positioned(Stream):
    """A stream with a position that can be restored, and without random numbers."""

    position = 0

    def __init__(self):
        super().__init__(is_random=False)

    def __iter__(self):
        begin, self.position = self.position, 0
        for index in range(begin, NUM_SAMPLES):
            self.position = index + 1
            yield self.data.inputs[index], self.data.inputs[index].sum(0, keepdim=True)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def make_loader(kind):
    generator = torch.Generator().manual_seed(3)
    num_workers = 2 if "workers" in kind else 0
    loader = StatefulDataLoader if "torchdata" in kind else DataLoader
    if kind in ("distributed sampler", "torchdata sampler"):
        data, manager = Augmented(), DistributedManager()
        return loader(data, 3, sampler=DistributedSampler(data, manager.world_size, manager.rank, seed=5))
    if kind in ("stream", "stream in workers", "torchdata stream", "torchdata stream in workers"):
        stream = Positioned() if "torchdata" in kind else Stream()
        return loader(distributed_stream(stream), 3, num_workers=num_workers)
    if kind == "positioned stream":
        return DataLoader(distributed_stream(Positioned()), 3)
    if kind == "own generator":
        return DataLoader(Augmented(), 7, shuffle=True, generator=generator)
    persists = "persist" in kind
    data = Augmented(is_random=not persists)  # of workers that persist the random numbers cannot be saved
    return loader(data, 7, shuffle=True, num_workers=num_workers, persistent_workers=persists)


class Network(nn.Module):
    """A network with all that a state can lack: statistics, a table, a counter, a vector, random numbers."""

    def __init__(self, *, has_queue=True):
        super().__init__()
        self.has_queue = has_queue
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        self.norm, self.dropout, self.last = nn.BatchNorm1d(6, momentum=0.3), nn.Dropout(0.2), nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(3))

    def forward(self, inputs):
        twice = inputs.repeat(2, 1)  # a norm needs two samples
        outputs = self.last(self.dropout(self.norm(self.first(twice)).relu()))[: len(inputs)] + self.queue.mean()
        if self.training:
            self.count += 1
        if self.training and self.has_queue:
            self.queue = torch.cat([self.queue[1:], inputs.detach().mean().reshape(1)])
        return outputs


class CutOffError(Exception):
    pass


class Counts(Callback):
    """Notes how often it has heard of what a run must hear of once."""

    def __init__(self):
        self.counts = collections.Counter()

    def on_step_end(self, handler, step):
        self.counts["step"] += 1

    def on_step_records(self, handler, records):
        self.counts.update({"records": len(records), "sum of steps": int(sum(one["step"] for one in records))})

    def on_validation_start(self, handler):
        self.counts["start"] += 1

    def on_validation_end(self, handler, record):
        self.counts["validation"] += 1
        record["val_noted"] = self.counts["validation"]

    def on_epoch_end(self, handler, record):
        self.counts["epoch"] += 1
        record["noted"] = self.counts["step"]

    def state_dict(self):
        return dict(self.counts)

    def load_state_dict(self, state):
        self.counts = collections.Counter(state)


class Saves(Callback):
    """Saves at one occurrence of an event."""

    def __init__(self, case, path):
        self.case, self.path, self.num_left = case, path, case.occurrence
        self.is_saved, self.num_steps_left = False, case.cut_after

    def hear(self, handler, event):
        if self.is_saved or event != self.case.event:
            return
        self.num_left -= 1
        if not self.num_left:
            handler.save(self.path)
            self.is_saved = True
            if not self.case.cut_after:
                raise CutOffError

    def on_train_batch_start(self, handler, batch):
        if self.is_saved:
            self.num_steps_left -= 1
            if not self.num_steps_left:
                raise CutOffError
        self.hear(handler, "on_train_batch_start")


for name in EVENTS:
    if name != "on_train_batch_start":
        setattr(Saves, name, lambda self, handler, *_, name=name: self.hear(handler, name))


def own_step(stepper, batch):
    inputs, targets = batch
    loss = nn.functional.mse_loss(stepper.module(inputs), targets)
    stepper.backward(loss, "body")
    stepper.step("body")
    other = (stepper.module(inputs) - targets).abs().mean()
    stepper.backward(other, "head")
    stepper.step("head")
    return {"loss": loss, "other": other}


def make_handler(case, saves=None):
    handler = NNHandler(Network, seed=3, strategy=case.strategy)
    parts = {None: None}
    if case.step == "own":
        parts = {
            "body": lambda model: [*model.first.parameters(), *model.norm.parameters()],
            "head": lambda model: model.last.parameters(),
        }
        handler.set_step(own_step)
    for name, parameters in parts.items():
        handler.set_optimizer(torch.optim.AdamW, name=name, parameters=parameters, lr=0.02)
        if case.schedule == "step":
            handler.set_scheduler(
                torch.optim.lr_scheduler.OneCycleLR, name=name, per="step", max_lr=0.05, total_steps=99
            )
        elif case.schedule == "epoch":
            handler.set_scheduler(torch.optim.lr_scheduler.StepLR, name=name, step_size=1, gamma=0.5)
        elif case.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
            handler.set_scheduler(plateau, name=name, monitor="loss", patience=0, threshold=9.0)
    handler.set_loss_fn(nn.functional.mse_loss)
    if case.loader in ("dataset", "cached", "workers"):
        options = {"cached": case.loader == "cached", **({"num_workers": 1} if case.loader == "workers" else {})}
        handler.set_train_loader(Augmented(), batch_size=3, **options)
    else:
        handler.set_train_loader(make_loader(case.loader))
    if case.validate != "never":
        handler.set_val_loader(TensorDataset(torch.ones(9, 4), torch.ones(9, 1)), batch_size=4)
    callbacks = [Rates(), Counts(), EarlyStopping("loss", patience=case.patience, min_delta=1e9)]
    if saves is not None:
        callbacks.insert(case.place, saves)
    for callback in callbacks:
        handler.add_callback(callback)
    return handler


def train(handler, case):
    steps = 2 if case.validate == "steps" else None
    handler.train(
        3,
        accumulate=case.accumulate,
        clip_norm=case.clip_norm,
        ema_decay=case.average,
        use_buffers=case.use_buffers,
        limit_batches=case.limit_batches,
        validate_every_steps=steps,
    )


def found_in(handler, *, is_main):
    """Return all that a run has come to, in plain values."""
    state = handler.whole_state_dict()
    model = {"module": dict(state["model"]["module"]), "average": dict(state["model"]["average"] or {})}
    histories = [[dict(one) for one in records] for records in (handler.history, handler.history.validations)]
    for record in histories[0]:
        del record["seconds"]
    training = {name: state["training"][name] for name in ("epoch", "num_batches", "num_passes", "reason", "scheduler")}
    optimizers = {name: one for name, one in state["training"]["optimization"].items() if name.startswith("optim")}
    found = {"history": histories, "training": training, "callbacks": state["callbacks"]}
    return found | ({"model": model, "optimizers": optimizers} if is_main else {})


def differences(one, other, path=""):
    """Yield where nested values differ."""
    if isinstance(one, dict):
        for name in one.keys() | other.keys():
            if name not in one or name not in other:
                yield f"{path}/{name} is missing"
            else:
                yield from differences(one[name], other[name], f"{path}/{name}")
    elif isinstance(one, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield f"{path}: {one.flatten()[:3].tolist()} is not {other.flatten()[:3].tolist()}"
    elif one != other and one == one:
        yield f"{path}: {one} is not {other}"


def run_handler(case, folder):
    """Return what came of a case, and what differs."""
    is_main = DistributedManager().is_main
    whole = make_handler(case)
    train(whole, case)
    saves = Saves(case, folder / "saved.pt")
    handler = make_handler(case, saves)
    if case.event in ("steps", "epochs"):
        every_steps = 1 + case.occurrence % 3 if case.event == "steps" else None
        handler.auto_save(folder / "auto", every_steps=every_steps)
        saves.is_saved, saves.num_steps_left = True, 2 + case.occurrence
    try:
        train(handler, case)
    except CutOffError:
        pass
    except DistmanError as error:
        if any(text in str(error) for text in REFUSALS):
            return "refused", []
        raise
    if not saves.is_saved:
        return "no such event", []
    resumed = make_handler(case)
    if case.event in ("steps", "epochs"):
        CheckpointFolder(folder / "auto").wait()
        resumed.auto_save(folder / "auto", every_epochs=100)
    else:
        resumed.load(folder / "saved.pt")
    train(resumed, case)
    return "exact", [*differences(found_in(resumed, is_main=is_main), found_in(whole, is_main=is_main))]


def run_loop(case, folder):
    """Do the same with a loop of its own."""
    path = folder / "saved.pt"
    whole = loop(case, None, None)
    try:
        loop(case, path, None)
    except CutOffError:
        pass
    except DistmanError as error:
        if any(text in str(error) for text in REFUSALS):
            return "refused", []
        raise
    if not broadcast_data(path.exists()):
        return "no such event", []
    return "exact", [*differences(loop(case, None, path), whole)]


def loop(case, save_to, load_from):
    torch.manual_seed(0)
    model = Network(has_queue=False)  # which each rank would have to save
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {"clip_norm": case.clip_norm, "ema_decay": case.average, "use_buffers": case.use_buffers}
    stepper = Stepper(model, optimizer, **options)
    loader = distributed_loader(Augmented(), batch_size=3)
    if load_from is not None:
        state = checkpoint.load(load_from)
        stepper.load_state_dict(state["stepper"])
        loader.load_state_dict(state["loader"])
        schedule.load_state_dict(state["schedule"])
        set_generators_state(state["random"][DistributedManager().rank])
    num_left, is_saved = case.occurrence, False
    while loader.state_dict()["epoch"] < 2:
        for inputs, targets in stepper.batches(loader, accumulate=case.accumulate):
            places = ("top", "middle", "end")
            for place in places:
                if place == "middle":
                    stepper.backward(nn.functional.mse_loss(model(inputs), targets))
                if place == "end" and stepper.step():
                    schedule.step()
                if save_to is not None and place == case.event and not is_saved:
                    num_left -= 1
                    if not num_left:
                        parts = {"stepper": stepper, "loader": loader, "schedule": schedule}
                        states = {name: part.state_dict() for name, part in parts.items()}
                        checkpoint.save({**states, "random": all_gather_objects(generators_state())}, save_to)
                        is_saved = True
            if is_saved:
                raise CutOffError
    state = stepper.state_dict()
    is_main = DistributedManager().is_main
    return {"steps": stepper.num_steps, **({name: state[name] for name in state} if is_main else {})}


def check(number, folder):
    """Try a case; return what came of it, and what differs."""
    case = draw(number)
    folder.mkdir(exist_ok=True, parents=True)
    try:
        return (run_loop if case.step == "loop" else run_handler)(case, folder)
    finally:
        gc.collect()  # joins the workers of what was cut off, which may take seconds


def check_all(numbers, folder):
    """Try cases on the ranks of a job; return for each what came of it, by its number."""
    DistributedManager.initialize()
    return {number: check(number, Path(folder) / str(number)) for number in numbers}


def tried(numbers, num_ranks, folder):
    """Yield what came of cases on so many ranks, some in each job."""
    for begin in range(0, len(numbers), 20):
        found, *_ = distman.run(check_all, numbers[begin : begin + 20], folder, n=num_ranks)
        yield from found.items()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    numbers = [1000 * options.seed + index for index in range(options.tries)]
    outcomes = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (1, 2, 3):
            for number, (outcome, differing) in tried(numbers[num_ranks - 1 :: 3], num_ranks, folder):
                outcomes["different" if differing else outcome] += 1
                if differing:
                    lines = [f"{number} on {num_ranks} ranks: {draw(number)}", *differing[:5]]
                    sys.stdout.write("\n    ".join(lines) + "\n")
    sys.stdout.write(f"{options.tries} cases: {dict(outcomes)}\n")
    raise SystemExit(outcomes["different"] > 0)


if __name__ == "__main__":
    main()
