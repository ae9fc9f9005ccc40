"""Train with a loop of your own: what distman adds to it are five lines.

    python docs/examples/own_loop.py
    distman run -n 3 docs/examples/own_loop.py
    distman run -n 2 docs/examples/own_loop.py

The progress of diabetes in 442 patients, which scikit-learn ships, is predicted from ten measurements. The last batch
of an epoch cannot be divided evenly; it counts all the same, each patient once. Numbers are in double precision, and
the losses are those of one process up to rounding.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import Subset, TensorDataset

from distman import DistributedManager
from distman.data import EvaluationLoader, TrainingLoader, distributed_loader
from distman.metrics import aggregate_loss

BATCH = 48  # over all ranks: can be divided by 1, 2, 3 and 4
NUM_TEST = 100


def load() -> tuple[Subset, Subset]:
    """Return the patients to learn from, and those for the test."""
    diabetes = load_diabetes()
    target = torch.tensor(diabetes.target)[:, None]
    data = TensorDataset(torch.tensor(diabetes.data) / 0.05, (target - target.mean()) / target.std())
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(data, order[NUM_TEST:]), Subset(data, order[:NUM_TEST])


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: TrainingLoader) -> float:
    """Go once through the data; return the mean loss over all samples of all ranks."""
    device = DistributedManager().device
    total, num_samples = 0.0, 0
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        (loss * loader.loss_scale).backward()  # DDP takes the mean over ranks; this makes it the mean over samples
        optimizer.step()
        total += loss.item() * loader.num_own
        num_samples += loader.num_own
    return aggregate_loss(total / max(num_samples, 1), weight=num_samples)


@torch.no_grad()
def evaluate(model: nn.Module, loader: EvaluationLoader) -> float:
    """Return the mean loss; ranks may have different numbers of batches, so nothing in the loop waits for others."""
    device = DistributedManager().device
    total, num_samples = 0.0, 0
    for inputs, targets in loader:
        total += nn.functional.mse_loss(model(inputs.to(device)), targets.to(device), reduction="sum").item()
        num_samples += len(inputs)
    return aggregate_loss(total / max(num_samples, 1), weight=num_samples)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict the progress of a disease.")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    train_data, test_data = load()
    train_loader = distributed_loader(train_data, batch_size=BATCH // manager.world_size)
    test_loader = distributed_loader(test_data, evaluation=True, batch_size=BATCH)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)).to(manager.device)
    model = manager.wrap_ddp(network)  # on one process it is the network itself
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for epoch in range(1, options.epochs + 1):
        loss = train_epoch(model, optimizer, train_loader)  # each iteration over the loader is shuffled anew
        if manager.is_main:
            print(f"epoch {epoch}/{options.epochs}  loss {loss:.12f}", flush=True)
    error = evaluate(network, test_loader)  # not the wrapped model: that one waits for the other ranks
    if manager.is_main:
        print(f"test: mean squared error {error:.4f}, where the mean of all patients would be off by 1")


if __name__ == "__main__":
    main()
