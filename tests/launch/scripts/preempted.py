"""A training with loader workers that is asked to stop: ``KIND FOLDER``. It saves, and ends with 75."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from distman import DistributedManager
from distman.checkpoint import save
from distman.data import distributed_loader
from distman.handler import Callback, NNHandler

EX_TEMPFAIL = 75


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(2), torch.ones(1)


def say_once_training(step):
    if step == 3:
        sys.stdout.write("training\n")
        sys.stdout.flush()


class Saying(Callback):
    def on_step_end(self, _handler, step):
        say_once_training(step)


def handler(folder):
    training = NNHandler(torch.nn.Linear, device="cpu", in_features=2, out_features=1)
    training.set_optimizer(torch.optim.SGD, lr=0.1)
    training.set_loss_fn(torch.nn.MSELoss())
    training.set_train_loader(distributed_loader(Samples(), batch_size=4, num_workers=2))
    training.auto_save(folder)
    training.add_callback(Saying())
    training.train(epochs=1)


def plain(folder, context="fork"):
    """A loop of one's own over torch's loader, whose workers are there before anything is asked."""
    loader = DataLoader(Samples(), batch_size=4, num_workers=2, multiprocessing_context=context)
    for step, _ in enumerate(loader):
        say_once_training(step)
        if DistributedManager().should_stop(step):
            save({"step": step}, folder / "latest.pt")
            raise SystemExit(EX_TEMPFAIL)


def spawned(folder):
    plain(folder, "spawn")


if __name__ == "__main__":
    DistributedManager.initialize()
    globals()[sys.argv[1]](Path(sys.argv[2]))
