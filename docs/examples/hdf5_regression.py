"""Learn from samples in several HDF5 files of different lengths.

    python docs/examples/hdf5_regression.py --folder /tmp/bars
    distman run -n 2 docs/examples/hdf5_regression.py --folder /tmp/bars
    distman run -n 2 docs/examples/hdf5_regression.py --folder /tmp/bars

A hot bar cools: from its temperatures now and a moment later a network tells how well it conducts heat. The files are
made if they are not there. The samples of all files are one dataset, which the ranks share out; each rank opens the
files itself and reads the rows that it needs. The losses are those of one process up to rounding. Needs h5py.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import ConcatDataset

from distman import DistributedManager, rank_zero_first
from distman.data import Hdf5Dataset
from distman.handler import NNHandler

NUM_SAMPLES = {"monday": 700, "tuesday": 450, "friday": 131, "test": 200}
NUM_POINTS = 16
NUM_WAVES = 4
BATCH = 48  # over all ranks: can be divided by 1, 2, 3 and 4


def measure(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return temperatures (sample, now or later, point) and the logarithms of the conductivities (sample, 1)."""
    generator = torch.Generator().manual_seed(seed)
    conductivity = torch.randn(num_samples, 1, generator=generator) * 0.5
    waves = torch.arange(1, NUM_WAVES + 1)
    shapes = torch.sin(waves[:, None] * torch.linspace(0, math.pi, NUM_POINTS))
    heat = torch.randn(num_samples, NUM_WAVES, generator=generator) / waves
    later = heat * torch.exp(-0.2 * conductivity.exp() * waves**2)
    return torch.stack([heat, later], dim=1) @ shapes, conductivity


def make_files(folder: Path) -> None:
    """Write the files that are not there; to be called on one rank."""
    import h5py

    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, num_samples) in enumerate(NUM_SAMPLES.items()):
        path = folder / f"{name}.h5"
        if not path.exists():
            temperatures, conductivity = measure(num_samples, seed)
            unfinished = path.with_suffix(".unfinished")  # after a kill, no half of a file has the name of a whole one
            with h5py.File(unfinished, "w") as file:
                file["temperatures"], file["conductivity"] = temperatures.numpy(), conductivity.numpy()
            unfinished.rename(path)


def open_files(folder: Path, names: list[str]) -> ConcatDataset:
    return ConcatDataset([Hdf5Dataset(folder / f"{name}.h5", ["temperatures", "conductivity"]) for name in names])


def make_model() -> nn.Module:
    sides = (2 * NUM_POINTS, 64, 64, 1)
    layers = [layer for pair in itertools.pairwise(sides) for layer in (nn.Linear(*pair), nn.SiLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from several HDF5 files.")
    parser.add_argument("--folder", type=Path, default=Path("bars"), help="the files; made if they are not there")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--cached", action="store_true", help="read once, then draw from memory: each rank its share")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    with rank_zero_first():  # the folder is one that all hosts see; else local_rank_zero_first()
        make_files(options.folder)
    *training, test = NUM_SAMPLES
    handler = NNHandler(make_model, logger_mode="console", seed=0)
    handler.set_optimizer(torch.optim.Adam, lr=5e-3)
    handler.set_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=options.epochs)
    handler.set_loss_fn(nn.functional.mse_loss)
    train_data = open_files(options.folder, training)
    handler.set_train_loader(train_data, batch_size=BATCH // manager.world_size, cached=options.cached)
    handler.set_val_loader(open_files(options.folder, [test]), batch_size=BATCH)
    history = handler.train(options.epochs)
    if manager.is_main:
        error = math.sqrt(history["val_loss"][-1])
        print(f"{len(train_data)} samples; last loss {history['loss'][-1]:.12f}")
        print(f"test: the conductivity is right to a factor of {math.exp(error):.2f}")


if __name__ == "__main__":
    main()
