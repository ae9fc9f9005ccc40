"""Take the noise out of maps of the sea of which clouds hide a part, with a U-Net that reads several HDF5 files.

    python docs/examples/unet.py --folder /tmp/sea
    distman run -n 3 docs/examples/unet.py --folder /tmp/sea
    distman run -n 2 docs/examples/unet.py --folder /tmp/sea

The files are made if they are not there. A batch is a dict of maps. The loss is a mean over the pixels that the
satellite has seen, of which some maps have many, some few, and some none; how many they are is told to the handler, so
any number of processes learns the same up to rounding. Needs h5py.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import ConcatDataset, default_collate

from distman import DistributedManager, local_rank_zero_first
from distman.data import Hdf5Dataset
from distman.handler import NNHandler

NUM_MAPS = {"spring": 90, "summer": 70, "autumn": 41, "winter": 60}  # the last one for the test
SIDE = 16  # pixels
NOISE = 0.5
Batch = dict[str, torch.Tensor]


def measure(num_maps: int, seed: int) -> Batch:
    """Return what the satellite sees, the truth, and which pixels no cloud hides; each (map, 1, row, column)."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(SIDE) * 2 * math.pi / SIDE
    waves = torch.stack([angles.sin(), angles.cos(), (2 * angles).sin(), (2 * angles).cos()])
    truth = torch.einsum("nij,ir,jc->nrc", torch.randn(num_maps, 4, 4, generator=generator), waves, waves)[:, None] / 2
    clouds = 1.5 * torch.rand(num_maps, 1, 1, 1, generator=generator)  # the share that they hide; some hide all
    seen = (torch.rand(truth.shape, generator=generator) > clouds).to(truth)
    noise = NOISE * torch.randn(truth.shape, generator=generator)
    return {"measured": seen * (truth + noise), "truth": truth, "seen": seen}


def make_files(folder: Path) -> None:
    """Write the files that are not there; to be called on one rank."""
    import h5py

    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, num_maps) in enumerate(NUM_MAPS.items()):
        path = folder / f"{name}.h5"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")  # after a kill, no half of a file has the name of a whole one
            with h5py.File(unfinished, "w") as file:
                for key, maps in measure(num_maps, seed).items():
                    file[key] = maps.numpy()
            unfinished.rename(path)


def open_files(folder: Path, names: list[str]) -> ConcatDataset:
    return ConcatDataset([Hdf5Dataset(folder / f"{name}.h5", ["measured", "truth", "seen"]) for name in names])


def collate(samples: list[tuple[torch.Tensor, ...]]) -> Batch:
    return dict(zip(["measured", "truth", "seen"], default_collate(samples), strict=True))


def block(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Return a convolution with a norm that looks at one map at a time, so not at how the ranks share the maps."""
    return nn.Sequential(nn.Conv2d(num_inputs, num_outputs, 3, padding=1), nn.GroupNorm(2, num_outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(2, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 2 * width)
        self.up = nn.ModuleList([block(4 * width, width), block(2 * width, width)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for layer in self.down:
            skipped.append(layer(x))
            x = nn.functional.avg_pool2d(skipped[-1], 2)
        x = self.bottom(x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat([x, skipped.pop()], dim=1))
        return self.last(x)


def forward(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    return model(torch.cat([batch["measured"], batch["seen"]], dim=1)), batch


def num_seen(batch: Batch) -> int:
    return int(batch["seen"].sum())


def masked_loss(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean of the squared errors of the pixels that are seen, and 0 if none is."""
    return (batch["seen"] * (outputs - batch["truth"]).square()).sum() / max(1, num_seen(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the noise out of maps.")
    parser.add_argument("--folder", type=Path, default=Path("sea"), help="the files; made if they are not there")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=24, help="maps of all ranks; a multiple of their number")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    with local_rank_zero_first():  # each host has its own files; rank_zero_first() where all see the same folder
        make_files(options.folder)
    *training, test = NUM_MAPS
    handler = NNHandler(UNet, width=options.width, logger_mode="console", seed=0)
    handler.set_optimizer(torch.optim.Adam, lr=5e-3)
    handler.set_loss_fn(masked_loss, forward=forward, num_samples=num_seen)
    data = open_files(options.folder, training)
    handler.set_train_loader(data, batch_size=options.batch // manager.world_size, collate_fn=collate)
    handler.set_val_loader(open_files(options.folder, [test]), batch_size=options.batch, collate_fn=collate)
    history = handler.train(options.epochs)
    if manager.is_main:
        for loss, of_test in zip(history["loss"], history["val_loss"], strict=True):
            print(f"loss {loss:.12f}, of the test {of_test:.12f}")
        print(f"noise {history['val_loss'][-1] ** 0.5:.2f}, before {NOISE:.2f}")


if __name__ == "__main__":
    main()
