"""Learn the density of a mixture of Gaussians, draw from it, and compare with the truth.

    python docs/examples/mixture.py --plot mixture.png
    distman run -n 2 docs/examples/mixture.py
    srun -N2 --ntasks-per-node=2 python docs/examples/mixture.py

A network learns the score of two-dimensional data by denoising; the ranks share each batch. The equation backwards in
time then draws samples, and the probability flow gives the log-likelihood of points that the network has not seen. Both
are shared out over the ranks. The mean of the log-density is known, so the model's mean says how good it is.

Source: Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", ICLR 2021.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import time
from pathlib import Path

import torch
from torch import nn

from distman import DistributedManager, split_sizes
from distman.metrics import aggregate_loss
from distman.score import VarianceExploding, denoising_loss, log_likelihood, random_stream, sample, score

NUM_PARTS = 5
RADIUS = 1.2
PART_STD = 0.3
WIDTH = 128
NUM_FREQUENCIES = 8
DETAIL = 0.25  # length below which the data are smooth
BATCH = 768  # over all ranks
LEARNING_RATE = 4e-3
EMA_DECAY = 0.999


class Mixture:
    """Parts of unequal weights on a circle."""

    def __init__(self, device: torch.device) -> None:
        angles = torch.arange(NUM_PARTS, device=device) * 2 * math.pi / NUM_PARTS
        self.means = RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)
        self.weights = torch.arange(1.0, NUM_PARTS + 1, device=device) / (NUM_PARTS * (NUM_PARTS + 1) / 2)

    def draw(self, num: int, generator: torch.Generator) -> torch.Tensor:
        device = self.means.device
        parts = torch.multinomial(self.weights, num, replacement=True, generator=generator)
        return self.means[parts] + PART_STD * torch.randn(num, 2, generator=generator, device=device)

    def log_density(self, x: torch.Tensor) -> torch.Tensor:
        squares = (x[:, None] - self.means).square().sum(dim=2) / PART_STD**2
        return (self.weights.log() - squares / 2).logsumexp(dim=1) - math.log(2 * math.pi * PART_STD**2)


class ScoreNetwork(nn.Module):
    """Estimates minus the noise, as a correction to what it would be if the data were one Gaussian of variance 1."""

    def __init__(self, sde: VarianceExploding) -> None:
        super().__init__()
        self.sde = sde
        self.register_buffer("frequencies", math.pi * torch.randn(NUM_FREQUENCIES))
        sizes = [2 + 1 + 2 * NUM_FREQUENCIES, WIDTH, WIDTH, WIDTH]
        layers = [layer for sides in itertools.pairwise(sizes) for layer in (nn.Linear(*sides), nn.SiLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        std = self.sde.marginal(t)[1][:, None]
        width = (1 + std**2).sqrt()  # of the noisy data
        level = std.log() / 4
        waves = level * self.frequencies
        residual = self.layers(torch.cat([x / width, level, waves.sin(), waves.cos()], dim=1))
        return std / width * (residual / (std**2 + DETAIL**2).sqrt() - x / width)


def train(sde: VarianceExploding, data: Mixture, num_steps: int) -> nn.Module:
    """Return the network with the mean of its weights over the last steps."""
    manager = DistributedManager()
    torch.manual_seed(0)
    network = ScoreNetwork(sde).to(manager.device)
    mean = copy.deepcopy(network).requires_grad_(requires_grad=False)
    model = manager.wrap_ddp(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    stream = random_stream("training", 0, manager.rank, manager.device)
    share = split_sizes(BATCH, manager.world_size)[manager.rank]
    for step in range(1, num_steps + 1):
        loss = denoising_loss(model, sde, data.draw(share, stream), generator=stream)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        follow(mean, network, rate=max(1 - EMA_DECAY, 10 / (step + 10)))
        if step % max(1, num_steps // 5) == 0:
            report(f"step {step}/{num_steps}  loss {aggregate_loss(loss, weight=share):.3f}")
    return mean


@torch.no_grad()
def follow(mean: nn.Module, network: nn.Module, rate: float) -> None:
    """Move the mean weights towards the present ones."""
    for old, new in zip(mean.parameters(), network.parameters(), strict=True):
        old.lerp_(new, rate)


def report(text: str) -> None:
    if DistributedManager().is_main:
        print(text, flush=True)


def plot(file: Path, data: Mixture, samples: torch.Tensor) -> None:
    from matplotlib.figure import Figure  # needed for the picture alone

    line = torch.linspace(-2.2, 2.2, 150)
    points = torch.cartesian_prod(line, line).to(data.means)
    density = data.log_density(points).exp().reshape(150, 150).T.cpu()
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    image = left.imshow(density, origin="lower", extent=(-2.2, 2.2, -2.2, 2.2), cmap="viridis")
    figure.colorbar(image, ax=left, label="density")
    left.set(title="true density", xlabel="x", ylabel="y")
    right.scatter(*samples.T.cpu(), s=2, alpha=0.4, linewidths=0)
    right.contour(line, line, density, levels=5, colors="black", linewidths=0.5)
    right.set(
        title=f"{len(samples)} samples of the model", xlabel="x", aspect="equal", xlim=(-2.2, 2.2), ylim=(-2.2, 2.2)
    )
    figure.savefig(file, dpi=100)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000, help="steps of the optimizer")
    parser.add_argument("--points", type=int, default=2000, help="points whose log-likelihood is computed")
    parser.add_argument("--samples", type=int, default=4000, help="samples to draw")
    parser.add_argument("--sampling-steps", type=int, default=500, help="steps from noise to each sample")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw true density and samples there")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    manager = DistributedManager.initialize()
    report(f"{manager.world_size} ranks")
    sde, data = VarianceExploding(sigma_min=0.02, sigma_max=20.0), Mixture(manager.device)
    started = time.perf_counter()
    score_fn = functools.partial(score, train(sde, data, options.steps), sde)
    report(f"trained in {time.perf_counter() - started:.1f} s")

    points = data.draw(options.points, random_stream("points", 0, 0, manager.device))
    started = time.perf_counter()
    found = log_likelihood(score_fn, sde, points, num_probes=None, batch_size=500).double().mean().item()
    truth = data.log_density(points).double().mean().item()
    report(f"mean log-density {truth:.4f}, of the model {found:.4f}: {abs(found / truth - 1):.2%} apart")
    report(f"likelihoods in {time.perf_counter() - started:.1f} s")

    started = time.perf_counter()
    samples = sample(score_fn, sde, (options.samples, 2), num_steps=options.sampling_steps, seed=0)
    report(f"{options.samples} samples in {time.perf_counter() - started:.1f} s")
    if options.plot and manager.is_main:
        plot(options.plot, data, samples)


if __name__ == "__main__":
    main()
