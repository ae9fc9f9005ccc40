"""Train under a scheduler that may take the machine away at any time: stop when asked, and go on as if nothing was.

    python docs/examples/preemption.py --folder run
    distman run -n 2 docs/examples/preemption.py --folder run
    distman run -n 2 docs/examples/preemption.py --folder run
    srun -N2 --ntasks-per-node=4 python docs/examples/preemption.py --folder run --requeue

Kill it, or send it SIGTERM, as Slurm does some time before it ends a job (`sbatch --signal=TERM@120`): the
same command goes on. On the same number of ranks it ends with the same weights to the last bit, on another number with
the same up to rounding. The loop is one of your own; `NNHandler.auto_save` does all of this in one line.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import NoReturn

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.checkpoint import CheckpointFolder, load_model_state, model_state
from distman.data import TrainingLoader, distributed_loader
from distman.metrics import aggregate_loss

BATCH = 48  # over all ranks: can be divided by 1, 2, 3 and 4
ASKED_TO_STOP = 75  # exit code EX_TEMPFAIL of sysexits.h, "try again later": not one of a failure


class Training:
    """Everything that the next start needs, and how it is saved and restored."""

    def __init__(self, folder: Path) -> None:
        manager = DistributedManager()
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(manager.device)
        self.model = manager.wrap_ddp(network)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.data / 16.0), torch.tensor(digits.target))
        self.loader: TrainingLoader = distributed_loader(data, batch_size=BATCH // manager.world_size)
        self.num_steps = 0
        self._folder = CheckpointFolder(folder)

    def restore(self) -> None:
        state = self._folder.load_latest()
        if state is not None:  # not the first start
            load_model_state(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.loader.load_state_dict(state["loader"])  # the epoch goes on after the samples that were drawn
            self.num_steps = state["num_steps"]
            report(f"going on after step {self.num_steps}")

    def save(self) -> None:
        """Save on all ranks after the same step; rank 0 writes, in the background."""
        state = {"model": model_state(self.model), "optimizer": self.optimizer.state_dict()}
        state |= {"loader": self.loader.state_dict(), "num_steps": self.num_steps}
        self._folder.save(state, self.num_steps)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # What is random is drawn from the number of the step, so there is no generator to save.
        contrast = torch.empty(()).uniform_(0.8, 1.2, generator=torch.Generator().manual_seed(self.num_steps))
        device = DistributedManager().device
        loss = nn.functional.cross_entropy(self.model((contrast * images).to(device)), labels.to(device))
        self.optimizer.zero_grad()
        (loss * self.loader.loss_scale).backward()
        self.optimizer.step()
        self.num_steps += 1
        return loss

    def stop(self, *, requeues: bool) -> NoReturn:
        """Leave the machine with everything saved."""
        self._folder.wait()  # it is on the disk
        report(f"asked to stop; saved after step {self.num_steps}")
        if requeues:
            DistributedManager().requeue()
        sys.exit(ASKED_TO_STOP)


def fingerprint(model: nn.Module) -> str:
    """Return a text that differs if a single bit of the weights does."""
    weights = [weight.detach().cpu().numpy().tobytes() for weight in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:12]


def report(text: str) -> None:
    if DistributedManager().is_main:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, with interruptions.")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="save here, and go on from here")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="for kills without a warning")
    parser.add_argument("--requeue", action="store_true", help="put the Slurm job back into the queue if it must stop")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    training = Training(options.folder)
    training.restore()
    while (epoch := training.loader.state_dict()["epoch"]) < options.epochs:
        for images, labels in training.loader:
            loss = training.step(images, labels)
            # All ranks get the same answer at the same step, and wait for no other rank.
            must_stop = manager.should_stop(training.num_steps)
            if must_stop or training.num_steps % options.save_every == 0:
                training.save()
            if must_stop:
                training.stop(requeues=options.requeue)
        last = aggregate_loss(loss, weight=training.loader.num_own)
        report(f"epoch {epoch + 1}/{options.epochs}  loss of the last step {last:.12f}")
    training.save()
    report(f"weights {fingerprint(training.model)} after {training.num_steps} steps")


if __name__ == "__main__":
    main()
