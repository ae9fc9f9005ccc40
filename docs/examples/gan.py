"""Train two networks against each other, each with an optimizer of its own, in a step of your own.

    python docs/examples/gan.py
    distman run -n 3 docs/examples/gan.py
    distman run -n 2 docs/examples/gan.py --folder run

A generator learns to put points where those of the data are, on a ring, and a discriminator to tell one from the other.
What the generator starts from belongs to the data, so any number of processes learns the same up to rounding. With
--folder the training saves itself there, and goes on from there bit for bit when it is started again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from distman import DistributedManager, Stepper
from distman.handler import NNHandler

BATCH = 120  # over all ranks: can be divided by 1, 2, 3 and 4
NUM_POINTS = 2410  # can not


def load() -> TensorDataset:
    """Return points on a ring of radius 1 and width 0.1, and what the generator makes its points of."""
    generator = torch.Generator().manual_seed(0)
    angles = 2 * math.pi * torch.rand(NUM_POINTS, generator=generator)
    radii = 1 + 0.1 * torch.randn(NUM_POINTS, generator=generator)
    points = radii[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(points, torch.randn(NUM_POINTS, 4, generator=generator))


def layers(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, num_outputs))


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = layers(4, 2), layers(2, 1)


def step(stepper: Stepper, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let the discriminator learn from a batch, then the generator; return their losses."""
    real, latents = batch
    generator, discriminator = stepper.module.generator, stepper.module.discriminator
    fake = generator(latents)
    loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
    stepper.backward(loss, "discriminator")
    stepper.step("discriminator")
    opposite = softplus(-discriminator(fake)).mean()
    stepper.backward(opposite, "generator")  # leaves the discriminator's gradients alone
    stepper.step("generator")
    return {"discriminator": loss, "generator": opposite}


def main() -> None:
    parser = argparse.ArgumentParser(description="Put points on a ring.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="save the training here, and go on from here")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    handler = NNHandler(Adversaries, seed=0)
    for name in ("discriminator", "generator"):
        handler.set_optimizer(
            torch.optim.Adam,
            name=name,
            lr=2e-3,
            betas=(0.5, 0.9),
            parameters=lambda model, name=name: getattr(model, name).parameters(),
        )
    handler.set_step(step)
    handler.set_train_loader(load(), batch_size=BATCH // manager.world_size)
    if options.folder is not None:
        handler.auto_save(options.folder, every_steps=20)
    history = handler.train(options.epochs, ema_decay=0.99)
    points = handler.ema_module.generator(torch.randn(1000, 4, generator=torch.Generator().manual_seed(1)))
    radii = points.detach().norm(dim=1)
    if manager.is_main:
        for name in ("discriminator", "generator"):
            print(f"loss of the {name} {history[name][-1]:.12f}")
        print(f"radius {radii.mean():.2f}, width {radii.std():.2f}; of the data 1.00 and 0.10")


if __name__ == "__main__":
    main()
