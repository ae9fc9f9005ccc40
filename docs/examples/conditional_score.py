"""Draw fine profiles to given coarse ones with a conditional score-based model, and compare with the exact answer.

    python docs/examples/conditional_score.py --folder run
    distman run -n 3 docs/examples/conditional_score.py --folder run
    distman run -n 2 docs/examples/conditional_score.py --guidance 1.5

The profiles are smooth Gaussian curves, and the coarse ones the means of their parts, so the fine profiles that belong
to a coarse one have a known mean and width. The ranks draw random numbers of their own in the training. The samples of
a trained model, which --folder keeps, are the same on any number of ranks up to rounding.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.handler import NNHandler

NUM_POINTS = 16
NUM_PARTS = 4
LENGTH = 2.5  # points over which a profile is smooth
BATCH = 240  # over all ranks: can be divided by 1, 2, 3 and 4
NULL = -9.0  # stands for no condition; no mean of a part comes near it

points = torch.arange(NUM_POINTS)
COVARIANCE = torch.exp(-((points[:, None] - points) ** 2) / (2 * LENGTH**2)).double() + 0.01 * torch.eye(NUM_POINTS)
MEANS = (
    torch.eye(NUM_PARTS, dtype=torch.float64).repeat_interleave(NUM_POINTS // NUM_PARTS, dim=1) * NUM_PARTS / NUM_POINTS
)


def draw_profiles(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return profiles (sample, point), and the means of their parts (sample, part)."""
    noise = torch.randn(num, NUM_POINTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    profiles = noise @ torch.linalg.cholesky(COVARIANCE).T
    return profiles, profiles @ MEANS.T


def exact(coarse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean (sample, point) and standard deviation (point) of the profiles that have these means of parts."""
    gain = COVARIANCE @ MEANS.T @ torch.linalg.inv(MEANS @ COVARIANCE @ MEANS.T)
    return coarse @ gain.T, (COVARIANCE - gain @ MEANS @ COVARIANCE).diagonal().sqrt()


class Network(nn.Module):
    """Estimates minus the noise, of which most can be seen where there is much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        num_inputs = NUM_POINTS + 2 * NUM_PARTS + 3
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, NUM_POINTS)
        )

    def forward(self, t: torch.Tensor, x: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
        is_known = (coarse > NULL).to(x)
        times = torch.stack([t, t.sqrt(), (6 * t).cos()], dim=1)
        return self.layers(torch.cat([x, is_known * coarse, is_known, times], dim=1)) - t.sqrt()[:, None] * x


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw fine profiles to coarse ones.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--profiles", type=int, default=6000, help="to learn from")
    parser.add_argument("--width", type=int, default=128, help="of the network")
    parser.add_argument("--guidance", type=float, default=1.0, help="more than 1 follows the conditions more closely")
    parser.add_argument("--samples", type=int, default=100, help="to draw to each of three coarse profiles")
    parser.add_argument("--folder", type=Path, help="keep the model here, and do not train again what is here")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    handler = NNHandler(Network, width=options.width, logger_mode="console", seed=0)
    handler.set_optimizer(torch.optim.Adam, lr=3e-3)
    handler.set_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=options.epochs)
    handler.set_sde("vp", conditional=True, drop_condition=0.1, null_condition=NULL)
    data = TensorDataset(*draw_profiles(options.profiles, seed=0))
    handler.set_train_loader(data, batch_size=BATCH // manager.world_size)
    if options.folder is not None:
        handler.auto_save(options.folder, every_epochs=10)
    handler.train(options.epochs, clip_norm=10.0, ema_decay=0.99)

    wanted = draw_profiles(3, seed=1)[1]
    samples = handler.sample(
        (3 * options.samples, NUM_POINTS),
        condition=wanted.repeat_interleave(options.samples, dim=0),
        guidance=options.guidance,
        num_steps=100,
        batch_size=20,
        seed=0,
    )
    if manager.is_main:
        samples = samples.cpu().reshape(3, options.samples, NUM_POINTS)
        mean, std = exact(wanted)
        print(f"samples {samples.mean():.12f}, squares {samples.square().mean():.12f}")
        print(f"means of parts: {((samples @ MEANS.T).mean(dim=1) - wanted).square().mean().sqrt():.3f} off")
        print(f"means: {(samples.mean(dim=1) - mean).square().mean().sqrt():.3f} off")
        print(f"width {samples.std(dim=1).mean():.3f}, exactly {std.mean():.3f}")


if __name__ == "__main__":
    main()
