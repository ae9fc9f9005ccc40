"""Learn to read handwritten digits, on any number of processes, under any launcher.

    python docs/examples/digits.py
    torchrun --standalone --nproc_per_node=2 docs/examples/digits.py
    mpirun -np 2 python docs/examples/digits.py
    srun -N2 -n4 python docs/examples/digits.py

A small convolutional network is trained with DistributedDataParallel on the 1,797 scans that scikit-learn
ships. Every batch is shared out over the ranks, unevenly where it must be, and the loss is weighted so that
the gradient is that of the whole batch: any number of ranks learns the same thing.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from distman import DistributedManager

EPOCHS = 6
BATCH = 64


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images, test images, training labels and test labels."""
    digits = load_digits()
    split = train_test_split(digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    images = [torch.tensor(part / 16.0, dtype=torch.float32).unsqueeze(1) for part in split[:2]]
    labels = [torch.tensor(part) for part in split[2:]]
    return images[0], images[1], labels[0], labels[1]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, epoch: int
) -> float:
    """Go once through the training data in an order that all ranks share; return the mean loss."""
    manager = DistributedManager()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    total = torch.zeros((), device=manager.device)
    for batch in order.split(BATCH):
        mine = batch[manager.rank :: manager.world_size]
        logits = model(images[mine].to(manager.device))
        loss = nn.functional.cross_entropy(logits, labels[mine].to(manager.device), reduction="sum")
        optimizer.zero_grad()
        (loss * manager.world_size / len(batch)).backward()  # DDP takes the mean over the ranks
        optimizer.step()
        total += loss.detach()
    return sum_over_ranks(total).item() / len(images)


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    manager = DistributedManager()
    mine = slice(manager.rank, None, manager.world_size)
    predicted = model(images[mine].to(manager.device)).argmax(dim=1)
    num_right = (predicted == labels[mine].to(manager.device)).sum()
    return sum_over_ranks(num_right).item() / len(images)


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    if DistributedManager().distributed:
        dist.all_reduce(value)
    return value


def check_weights(model: nn.Module) -> str:
    """Return a fingerprint of the weights, after making sure that it is the same on every rank."""
    manager = DistributedManager()
    fingerprint = hashlib.sha256()
    for parameter in model.parameters():
        fingerprint.update(parameter.detach().cpu().numpy().tobytes())
    mine = torch.tensor(int(fingerprint.hexdigest()[:12], 16), device=manager.device)
    if manager.distributed:
        lowest, highest = mine.clone(), mine.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        if lowest != highest:
            raise RuntimeError(f"the weights differ between ranks; here they are {fingerprint.hexdigest()[:12]}")
    return fingerprint.hexdigest()[:12]


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    train_images, test_images, train_labels, test_labels = load()
    model = manager.wrap_ddp(make_model().to(manager.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if manager.is_main:
        print(manager, flush=True)
    for epoch in range(EPOCHS):
        loss = train_epoch(model, optimizer, train_images, train_labels, epoch)
        if manager.is_main:
            print(f"epoch {epoch + 1}/{EPOCHS}  loss {loss:.4f}", flush=True)
    accuracy = measure_accuracy(model, test_images, test_labels)
    fingerprint = check_weights(model)
    if manager.is_main:
        print(
            f"test accuracy {accuracy:.4f}, weights {fingerprint} on all {manager.world_size} ranks",
            flush=True,
        )


if __name__ == "__main__":
    main()
