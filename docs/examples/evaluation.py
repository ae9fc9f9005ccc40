"""Evaluate a model on all ranks: each sample once, none repeated to make the parts even.

    python docs/examples/evaluation.py
    distman run -n 3 docs/examples/evaluation.py --predictions predictions.csv
    distman run -n 2 docs/examples/evaluation.py

A classifier of handwritten digits is loaded (and fitted before, if the file is not there) and asked about 500 scans
that it has not seen. Numbers of samples that the number of ranks does not divide are no special case: the table of
confusions is the same to the last digit on any number of ranks, and the predictions come in the order of the samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from distman import DistributedManager, rank_zero_first, rank_zero_only
from distman.checkpoint import load
from distman.collectives import fused_all_reduce, gather_v
from distman.data import distributed_loader

NUM_TEST = 500
RIDGE = 1e-2


def fit(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return weights by least squares: this stands for the training that you have done."""
    features = expand(images)
    normal = features.T @ features + RIDGE * len(images) * torch.eye(features.shape[1])
    return torch.linalg.solve(normal, features.T @ torch.nn.functional.one_hot(labels, 10).double())


def expand(images: torch.Tensor) -> torch.Tensor:
    """Return random features of the images, and a constant; the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(64, 300, generator=generator).to(images)
    return torch.cat([torch.relu(images @ directions), images.new_ones(len(images), 1)], dim=1)


@rank_zero_only
def write(file: Path, predictions: torch.Tensor, labels: torch.Tensor) -> None:
    rows = [f"{i},{predicted},{label}" for i, (predicted, label) in enumerate(zip(predictions, labels, strict=True))]
    file.write_text("\n".join(["sample,predicted,true", *rows, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a classifier of handwritten digits.")
    parser.add_argument("--weights", type=Path, default=Path("digits_weights.pt"), help="made if it is not there")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="write the predictions there, in order")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16.0), torch.tensor(digits.target)
    with rank_zero_first():
        if not options.weights.exists():
            torch.save(fit(images[:-NUM_TEST], labels[:-NUM_TEST]), options.weights)  # distman's save() needs all ranks
    weights = load(options.weights)

    data = TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:])
    confusions = torch.zeros(10, 10, dtype=torch.int64, device=manager.device)
    predictions = [torch.empty(0, dtype=torch.int64, device=manager.device)]  # of a rank that has no sample
    for batch, truth in distributed_loader(data, evaluation=True, batch_size=options.batch):
        predicted = (expand(batch.to(manager.device)) @ weights).argmax(dim=1)
        confusions += torch.bincount(10 * truth.to(manager.device) + predicted, minlength=100).reshape(10, 10)
        predictions.append(predicted)  # ranks make different numbers of steps: nothing here may wait for another one
    confusions = fused_all_reduce(confusions)  # whole numbers: the sum is exact
    predictions = gather_v(torch.cat(predictions))  # on rank 0, one rank's after the other's
    if options.predictions:
        write(options.predictions, predictions, labels[-NUM_TEST:])
    if manager.is_main:
        right = confusions.diagonal()
        print(f"{right.sum()} of {confusions.sum()} are right, on {manager.world_size} ranks")
        print(
            "of each digit:", " ".join(f"{one / all_:.3f}" for one, all_ in zip(right, confusions.sum(1), strict=True))
        )


if __name__ == "__main__":
    main()
