"""Learn to read digits with everything that a training usually has, and go on after a preemption.

    python docs/examples/classifier.py --folder run
    distman run -n 3 docs/examples/classifier.py --folder run
    srun -N2 --ntasks-per-node=4 python docs/examples/classifier.py --folder run --amp bf16

Each image is moved a little, another way in each epoch; steps have the gradient of four batches, which is clipped; the
learning rate rises and falls, and the moving average of the weights is tested. The three best models are in run/best,
the curves in run/curves: tensorboard --logdir run/curves. Asked to stop, by SIGTERM say, the training saves itself and
ends with exit code 75; the same command goes on. Any number of processes learns the same, up to rounding. Needs
scikit-learn and tensorboard.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from distman import DistributedManager
from distman.handler import EarlyStopping, ModelCheckpoint, NNHandler, TensorBoardTracker

BATCH = 24  # over all ranks: can be divided by 1, 2, 3 and 4
ACCUMULATE = 4
NUM_TEST = 397


class Moved(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images that are moved by a pixel at most; where to depends on epoch and image, and not on the rank."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels, self.epoch = images, labels, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.epoch * len(self) + index)
        down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return self.images[index].roll((down, right), dims=(1, 2)), self.labels[index]


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).double().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", type=int, default=1400, help="to learn from")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--amp", choices=["bf16", "fp16"], help="automatic mixed precision")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="checkpoints and curves")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64 if options.amp is None else torch.float32)
    manager = DistributedManager.initialize()
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images / 16.0).unsqueeze(1).to(torch.get_default_dtype()),
        torch.tensor(digits.target),
    )
    training = Moved(images[: min(options.images, len(images) - NUM_TEST)], labels)
    num_steps = options.epochs * math.ceil(len(training) / (BATCH * ACCUMULATE))
    warm_up = max(1, num_steps // 10)

    def rate(step: int) -> float:
        return min((step + 1) / warm_up, (1 + math.cos(math.pi * min(1.0, step / num_steps))) / 2)

    handler = NNHandler(make_model, width=options.width, logger_mode="console", seed=0)
    handler.set_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=1e-3)
    handler.set_scheduler(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate, per="step")
    handler.set_loss_fn(nn.functional.cross_entropy)
    handler.add_metric("accuracy", accuracy)
    handler.set_train_loader(training, batch_size=BATCH // manager.world_size)
    handler.set_val_loader(TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:]), batch_size=128)
    handler.add_callback(EarlyStopping("val_loss", patience=3))
    handler.add_callback(ModelCheckpoint(options.folder / "best", num_best=3))
    handler.add_callback(TensorBoardTracker(options.folder / "curves"))
    handler.auto_save(options.folder / "training", every_steps=10)
    history = handler.train(options.epochs, accumulate=ACCUMULATE, amp=options.amp, clip_norm=1.0, ema_decay=0.9)
    if manager.is_main:
        for loss, of_test in zip(history["loss"], history["val_loss"], strict=True):
            print(f"loss {loss:.12f}, of the test {of_test:.12f}")
        print(f"of {NUM_TEST} images {history['val_accuracy'][-1]:.1%} are read correctly")


if __name__ == "__main__":
    main()
