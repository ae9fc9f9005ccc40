"""Use distman beside Lightning Fabric: Fabric trains, distman brings what Fabric does not have.

    python docs/examples/with_fabric.py --devices 2
    distman run -n 2 docs/examples/with_fabric.py
    distman run -n 2 docs/examples/with_fabric.py

Fabric wraps model, optimizer and loader. With distman beside it a rank that fails is named on all others, an evaluation
sees each sample once, and shards of different sizes can be gathered. Either of the two makes the process group, and the
other one takes it over: if Fabric starts the processes, it comes first. Needs lightning-fabric.
"""

from __future__ import annotations

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distman import DistributedManager
from distman.collectives import all_gather_v
from distman.data import distributed_loader

try:
    from lightning_fabric import Fabric
except ModuleNotFoundError:
    sys.exit("This example needs Lightning Fabric: pip install lightning-fabric")

BATCH = 48  # over all ranks: can be divided by 1, 2, 3 and 4
NUM_TEST = 500


def train(fabric: Fabric, data: TensorDataset, num_epochs: int) -> nn.Module:
    """Train as Fabric's users do; return the bare network."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=5e-3))
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH // fabric.world_size, shuffle=True, drop_last=True))
    for epoch in range(1, num_epochs + 1):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {epoch}/{num_epochs}  loss of the last step {loss.item():.6f}", flush=True)
    return network


@torch.no_grad()
def predict(network: nn.Module, data: TensorDataset) -> torch.Tensor:
    """Return the predicted digits of all samples, in order: Fabric's loaders would repeat some to make ranks even."""
    device = DistributedManager().device
    batches = distributed_loader(data, evaluation=True, batch_size=64)
    predicted = [network(images.to(device)).argmax(dim=1) for (images,) in batches]
    return all_gather_v(torch.cat([torch.empty(0, dtype=torch.int64, device=device), *predicted]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Read digits with Fabric and distman.")
    parser.add_argument("--devices", type=int, help="processes that Fabric starts, if no launcher has started them")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    if options.devices:  # Fabric starts the processes, each of which comes here
        fabric = Fabric(devices=options.devices)
        fabric.launch()
        manager = DistributedManager.initialize()  # takes over the group that Fabric has made
    else:
        manager = DistributedManager.initialize()
        fabric = Fabric(devices=manager.local_world_size, num_nodes=manager.num_nodes)
        fabric.launch()  # takes over the group of the manager

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    network = train(fabric, TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST]), options.epochs)
    predicted = predict(network, TensorDataset(images[-NUM_TEST:])).cpu()
    accuracy = (predicted == labels[-NUM_TEST:]).double().mean().item()
    fabric.print(f"{len(predicted)} predictions of {manager.world_size} ranks, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
