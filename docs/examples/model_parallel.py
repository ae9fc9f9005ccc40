"""Split a layer over two ranks and the data over the rest: the losses are those of one process.

    python docs/examples/model_parallel.py
    distman run -n 4 docs/examples/model_parallel.py
    srun -N2 --ntasks-per-node=2 python docs/examples/model_parallel.py

The ranks are a grid. A row of it, the group "model_parallel", holds one copy of the network, each rank a slice of its
hidden layer. A column, the group "data_parallel", holds the same slice, and each rank sees other images:

    4 ranks:  model_parallel [0, 1] [2, 3]   data_parallel [0, 2] [1, 3]

One process is a grid of one, and runs the same lines. Numbers are in double precision, so that curves can be compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from distman import DistributedManager, mappings
from distman.collectives import fused_all_reduce

EPOCHS = 6
BATCH = 64
WIDTH = 32
HIDDEN = 129  # need not be even: the slices may differ in size


class ParallelMLP(nn.Module):
    """Linear, GELU, Linear, whole on the outside: the first is column-parallel, the second row-parallel.

    Every rank draws the full layers from the same seed, and keeps its slice.
    """

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.first_weight = keep_slice(first.weight, dim=0)
        self.first_bias = keep_slice(first.bias, dim=0)
        self.second_weight = keep_slice(second.weight, dim=1)
        self.second_bias = second.bias  # added once, after the sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = mappings.copy_to_parallel_region(x, "model_parallel")
        hidden = nn.functional.gelu(nn.functional.linear(x, self.first_weight, self.first_bias))
        part = nn.functional.linear(hidden, self.second_weight)
        return mappings.reduce_from_parallel_region(part, "model_parallel") + self.second_bias


def keep_slice(full: torch.Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(mappings.scatter_to_parallel_region(full.detach(), dim, "model_parallel"))


def make_model() -> nn.Module:
    """Return the network; a gradient is summed over the ranks that hold the same parameter and see other images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), ParallelMLP(), nn.Linear(WIDTH, 10))
    return mappings.mark_module_as_shared(model.to(DistributedManager().device), "data_parallel")


def load() -> list[torch.Tensor]:
    """Return training images, test images, training labels and test labels."""
    digits = load_digits()
    split = train_test_split(digits.data / 16.0, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    return [torch.tensor(part, device=DistributedManager().device) for part in split]


def my_share(samples: torch.Tensor) -> torch.Tensor:
    """Return the samples for this rank's row of the grid; the shares may differ in size."""
    manager = DistributedManager()
    return samples[manager.group_rank("data_parallel") :: manager.group_size("data_parallel")]


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, epoch: int
) -> float:
    """Go once through the training data in an order that all ranks share; return the mean loss."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    total = torch.zeros((), device=images.device)
    for batch in order.split(BATCH):
        mine = my_share(batch)
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        optimizer.zero_grad()
        (loss / len(batch)).backward()  # this rank's part of the mean over the whole batch
        optimizer.step()
        total += loss.detach()
    return fused_all_reduce(total, group="data_parallel").item() / len(images)


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    num_right = (model(my_share(images)).argmax(dim=1) == my_share(labels)).sum()
    return fused_all_reduce(num_right, group="data_parallel").item() / len(images)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the loss of every epoch there, as JSON")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="times to go through the training data")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    manager.create_process_subgroup("model_parallel", 2 if manager.world_size % 2 == 0 else 1)
    manager.create_orthogonal_process_group("data_parallel", "model_parallel")
    train_images, test_images, train_labels, test_labels = load()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    num_rows, num_columns = manager.group_size("data_parallel"), manager.group_size("model_parallel")
    if manager.is_main:
        print(f"{num_rows} x {num_columns} ranks: data parallel x model parallel", flush=True)
    losses = []
    for epoch in range(options.epochs):
        losses.append(train_epoch(model, optimizer, train_images, train_labels, epoch))
        if manager.is_main:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {losses[-1]:.12f}", flush=True)
    accuracy = measure_accuracy(model, test_images, test_labels)
    if manager.is_main:
        print(f"test accuracy {accuracy:.4f}", flush=True)
        if options.losses:
            options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
