"""Search for good hyperparameters: many small trainings at once, shared out over devices and ranks.

    python docs/examples/sweep.py
    python docs/examples/sweep.py --workers 4
    distman run -n 2 docs/examples/sweep.py
    srun -N4 --ntasks-per-node=1 python docs/examples/sweep.py

One process is enough for all GPUs of a machine: the executor keeps a worker on each, and gives the next training to the
one that is free first. On several machines, start one rank on each; the ranks share out the trainings. A training
depends on its own settings and seed only, so the table is the same wherever it is computed. One that fails is a line of
the table and not the end of the others.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import Future

import torch
from sklearn.datasets import load_digits
from torch import nn

from distman import DistributedManager, ParallelExecutor
from distman.collectives import all_gather_objects

RATES = (1e-4, 1e-2, 1.0, -1.0)  # the last is refused by the optimizer: a sweep must survive that
WIDTHS = (8, 32)
NUM_TEST = 450


def train(device: torch.device, rate: float, width: int, num_steps: int) -> float:
    """Return the accuracy of a network on digits that it has not seen; runs in a worker."""
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float64, device=device)
    labels = torch.tensor(digits.target, device=device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(num_steps):
        batch = torch.randint(len(images) - NUM_TEST, (64,), generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(images[-NUM_TEST:]).argmax(dim=1) == labels[-NUM_TEST:]
    return right.double().mean().item()


def result_of(future: Future[float]) -> float | str:
    """Return what a training came to, or why it failed."""
    error = future.exception()
    return future.result() if error is None else f"{type(error).__name__}: {error}"


def open_executor(num_workers: int) -> ParallelExecutor:
    """Return an executor on the GPUs of this machine, or with some workers on the CPU where there is none."""
    manager = DistributedManager()
    if manager.local_world_size > 1:  # the ranks of this machine have a device each
        return ParallelExecutor(devices=[manager.device])
    return ParallelExecutor() if manager.cuda else ParallelExecutor(devices=["cpu"] * num_workers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search for a learning rate and a width.")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--workers", type=int, default=2, help="trainings at once where there is no GPU")
    options = parser.parse_args()

    manager = DistributedManager.initialize()
    trials = list(itertools.product(RATES, WIDTHS))
    mine = trials[manager.rank :: manager.world_size]
    with open_executor(options.workers) as executor:
        futures = {trial: executor.submit(train, *trial, options.steps) for trial in mine}
        found = {trial: result_of(future) for trial, future in futures.items()}
    table = {trial: result for part in all_gather_objects(found) for trial, result in part.items()}
    if manager.is_main:
        for rate, width in trials:
            print(f"rate {rate:<8g} width {width:<4d} {table[rate, width]}")
        accuracies = {trial: result for trial, result in table.items() if not isinstance(result, str)}
        rate, width = max(trials, key=lambda trial: accuracies.get(trial, 0.0))
        print(f"best: rate {rate:g}, width {width}, accuracy {accuracies[rate, width]:.4f}")


if __name__ == "__main__":
    main()
