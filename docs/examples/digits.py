"""Learn to read handwritten digits, on any number of processes, under any launcher.

    python docs/examples/digits.py
    distman run -n 2 docs/examples/digits.py
    mpirun -np 2 python docs/examples/digits.py
    srun -N2 -n4 python docs/examples/digits.py

A small convolutional network is trained on the 1,797 scans that scikit-learn ships. The ranks share out every batch, so
any number of them learns the same thing. With --folder the training saves itself there, and goes on from there when it
is started again; with --plots it draws its losses and accuracies into a folder.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.handler import NNHandler

BATCH = 64


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return images and labels for training, and for the test."""
    digits = load_digits()
    split = train_test_split(digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    images = [torch.tensor(part / 16.0, dtype=torch.float32).unsqueeze(1) for part in split[:2]]
    labels = [torch.tensor(part) for part in split[2:]]
    return TensorDataset(images[0], labels[0]), TensorDataset(images[1], labels[1])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).double().mean()


def check_weights(model: nn.Module) -> str:
    """Return a fingerprint of the weights, after making sure that it is the same on every rank."""
    fingerprint = hashlib.sha256()
    for parameter in model.parameters():
        fingerprint.update(parameter.detach().cpu().numpy().tobytes())
    found = all_gather_objects(fingerprint.hexdigest()[:12])
    if len(set(found)) > 1:
        raise RuntimeError(f"the weights differ between ranks: {found}")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="save the training here, and go on from here")
    parser.add_argument("--plots", type=Path, help="draw losses and accuracies into this folder")
    arguments = parser.parse_args()

    manager = DistributedManager.initialize()
    if manager.is_main:
        print(manager, flush=True)
    training, test = load()
    handler = NNHandler(make_model, logger_mode="console", seed=0)
    handler.set_optimizer(torch.optim.Adam, lr=5e-3)
    handler.set_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=arguments.epochs)
    handler.set_loss_fn(nn.functional.cross_entropy)
    handler.add_metric("accuracy", accuracy)
    handler.set_train_loader(training, batch_size=max(1, BATCH // manager.world_size))
    handler.set_val_loader(test, batch_size=BATCH)
    if arguments.folder is not None:
        handler.auto_save(arguments.folder, every_steps=10)
    history = handler.train(arguments.epochs)
    if arguments.plots is not None:
        handler.plot_losses(arguments.plots / "losses.png")
        handler.plot_metrics(arguments.plots / "accuracies.png")
    fingerprint = check_weights(handler.module)
    if manager.is_main:
        print(
            f"test accuracy {history['val_accuracy'][-1]:.4f}, weights {fingerprint} on all {manager.world_size} ranks",
            flush=True,
        )


if __name__ == "__main__":
    main()
