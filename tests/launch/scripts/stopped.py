"""A training with workers that saves when it is asked to stop: FOLDER LOADER."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distman import DistributedManager
from distman.checkpoint import save
from distman.data import distributed_loader, distributed_stream

PAUSE = 0.02


class Samples(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(1_000_000))


LOADERS = {
    "torch": lambda: DataLoader(Samples(), num_workers=2),
    "distman": lambda: distributed_loader(Samples(), num_workers=2),
    "stream": lambda: DataLoader(distributed_stream(Stream()), num_workers=2),
}


def main(folder, kind):
    manager = DistributedManager.initialize()
    for step, batch in enumerate(LOADERS[kind]()):
        time.sleep(PAUSE)
        if step == 0:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        if manager.should_stop(step):
            save({"step": step, "batch": batch}, Path(folder) / "state.pt")
            sys.exit(os.EX_TEMPFAIL)


if __name__ == "__main__":
    main(*sys.argv[1:])
