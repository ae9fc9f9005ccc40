"""A training in which one rank may become slower, for `tests.slow_trials`: prints when it was named, and as what."""

import argparse
import json
import time

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from distman import DistributedManager, Stepper
from distman.data import distributed_loader
from distman.handler import Callback, NNHandler

MATRIX = torch.full((96, 96), 1 / 96)


class Work:
    """Takes some time in each phase of a step, asleep or busy; on one rank, from some step on, longer in one."""

    def __init__(self, arguments, rank):
        self.arguments, self.rank, self.step = arguments, rank, 0

    def do(self, phase):
        slow = self.arguments
        is_slow = (self.rank, phase) == (slow.rank, slow.phase) and self.step >= slow.since
        factor = slow.factor if is_slow else 1.0
        product = MATRIX
        time.sleep(slow.seconds * factor)
        for _ in range(round(slow.units * factor)):
            product = product @ MATRIX
        return product[0, 0] * 0


class Samples(Dataset):
    def __init__(self, work, length):
        self.work, self.length = work, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        inputs = torch.tensor([float(index % 7)]) + self.work.do("loading")
        return inputs, inputs


class Busy(torch.autograd.Function):
    """Works in the forward pass and in the backward pass."""

    @staticmethod
    def forward(context, inputs, work):
        context.work = work
        return inputs + work.do("forward")

    @staticmethod
    def backward(context, gradient):
        return gradient + context.work.do("backward"), None


class Model(torch.nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work, self.layer = work, torch.nn.Linear(1, 1)

    def forward(self, inputs):
        return Busy.apply(self.layer(inputs), self.work)


class Report:
    """What `slow_ranks()` said first, and how often it changed."""

    def __init__(self, manager, work):
        self.manager, self.work, self.found, self.last = manager, work, [], ()

    def end_step(self):
        self.work.step += 1
        now = self.manager.slow_ranks()
        if now != self.last:
            self.last = now
            self.found += [(self.work.step, one.rank, one.phase, one.factor) for one in now]


class Reporting(Callback):
    def __init__(self, report):
        self.report = report

    def on_step_end(self, _handler, _step):
        self.report.end_step()


def train_by_stepper(loader, model, report):
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for inputs, targets in stepper.batches(loader):
        stepper.backward(mse_loss(model(inputs), targets))
        stepper.step()
        report.end_step()


def train_by_ddp(loader, model, report):
    model = report.manager.wrap_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for inputs, targets in loader:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        report.end_step()


def train_by_handler(loader, model, report):
    handler = NNHandler(lambda: model)
    handler.set_optimizer(torch.optim.SGD, lr=0.0)
    handler.set_loss_fn(mse_loss)
    handler.set_train_loader(loader)
    handler.add_callback(Reporting(report))
    handler.train(1)


LOOPS = {"stepper": train_by_stepper, "ddp": train_by_ddp, "handler": train_by_handler}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=-1, help="the slow one")
    parser.add_argument("--phase", default="loading")
    parser.add_argument("--factor", type=float, default=1.3)
    parser.add_argument("--since", type=int, default=20, help="the step from which it is slow")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--seconds", type=float, default=0.0, help="asleep in each phase: they need no CPU")
    parser.add_argument("--units", type=int, default=0, help="of work in each phase")
    parser.add_argument("--loop", choices=LOOPS, default="stepper")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    manager = DistributedManager.initialize(device="cpu")
    work = Work(arguments, manager.rank)
    report = Report(manager, work)
    loader = distributed_loader(Samples(work, arguments.steps * manager.world_size), shuffle=False)
    LOOPS[arguments.loop](loader, Model(work), report)
    if manager.is_main:
        print(json.dumps(report.found), flush=True)  # noqa: T201 - what the trial reads


if __name__ == "__main__":
    main()
