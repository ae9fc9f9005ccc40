"""Waves in shallow water on a field that is split over ranks: a solver, and a U-Net that learns to forecast them.

    python docs/examples/shallow_water.py --plot waves.png
    distman run -n 4 docs/examples/shallow_water.py
    distman run -n 4 docs/examples/shallow_water.py --rows 2 --columns 1

The ranks are a mesh of "data", "rows" and "columns". Each holds a block of every field and never a full one. The solver
takes what its differences need of the neighbours by a halo exchange; the U-Net is a model for one process, which
`decompose` turns into one for blocks. Over "data" the fields are shared out. Any mesh computes the same, to rounding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from distman import DistributedManager, split_sizes
from distman.collectives import fused_all_reduce
from distman.domain import decompose, gather_domain, halo_exchange, scatter_domain

DIMS = {-2: "rows", -1: "columns"}
GRID = (48, 64)  # periodic; lengths in cells, and times in those that a wave takes to cross one
CORIOLIS = 0.05
VISCOSITY = 0.02
TIME_STEP = 0.4
STEPS_PER_SNAPSHOT = 10
NUM_FIELDS = 6  # and one more, for the test
HORIZON = 4  # snapshots that are forecast


def start() -> torch.Tensor:
    """Return still water with some bumps: (field, height and two velocities, row, column)."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.arange(length) for length in GRID)
    state = torch.zeros(NUM_FIELDS + 1, 3, *GRID)
    for field in state:
        for _ in range(4):
            height, row, column = torch.rand(3, generator=generator)
            angles = torch.pi * (rows / GRID[0] - row), torch.pi * (columns / GRID[1] - column)
            # Of a width of four cells, and periodic.
            square = (GRID[0] * angles[0].sin())[:, None] ** 2 + (GRID[1] * angles[1].sin()) ** 2
            field[0] += 0.3 * (height - 0.2) * torch.exp(-square / (2 * (torch.pi * 4) ** 2))
    return state


def rates(state: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
    """Return how fast the state of a block changes."""
    wide = halo_exchange(state, 1, (-2, -1), boundary="circular", sizes=sizes, group=("rows", "columns"))
    height, u, v = wide.unbind(1)

    def along_x(field: torch.Tensor) -> torch.Tensor:
        return (field[:, 1:-1, 2:] - field[:, 1:-1, :-2]) / 2

    def along_y(field: torch.Tensor) -> torch.Tensor:
        return (field[:, 2:, 1:-1] - field[:, :-2, 1:-1]) / 2

    energy, rotation = height + (u**2 + v**2) / 2, CORIOLIS + along_x(v) - along_y(u)
    friction = wide[..., 2:, 1:-1] + wide[..., :-2, 1:-1] + wide[..., 1:-1, 2:] + wide[..., 1:-1, :-2] - 4 * state
    changes = [
        -along_x((1 + height) * u) - along_y((1 + height) * v),
        rotation * state[:, 2] - along_x(energy),
        -rotation * state[:, 1] - along_y(energy),
    ]
    return torch.stack(changes, 1) + VISCOSITY * friction


def simulate(num_snapshots: int) -> torch.Tensor:
    """Return the snapshots of this rank's blocks: (time, field, height and velocities, row, column)."""
    manager = DistributedManager()
    is_first = manager.group_rank("rows") == manager.group_rank("columns") == 0
    state = scatter_domain(start().to(manager.device) if is_first else None, DIMS)
    sizes = [split_sizes(length, manager.group_size(axis)) for length, axis in zip(GRID, DIMS.values(), strict=True)]
    snapshots = [state]
    for _ in range(num_snapshots - 1):
        for _ in range(STEPS_PER_SNAPSHOT):  # Runge-Kutta of third order
            first = state + TIME_STEP * rates(state, sizes)
            second = (3 * state + first + TIME_STEP * rates(first, sizes)) / 4
            state = (state + 2 * second + 2 * TIME_STEP * rates(second, sizes)) / 3
        snapshots.append(state)
    return torch.stack(snapshots)


def layer(num_inputs: int, num_outputs: int, stride: int = 1) -> nn.Sequential:
    convolve = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, padding_mode="circular")
    return nn.Sequential(convolve, nn.SiLU())


class UNet(nn.Module):
    """The change of the water up to the next snapshot; nothing in it knows of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.down = layer(3, width), layer(width, 2 * width, stride=2)
        self.bottom = layer(2 * width, 2 * width)
        self.up, self.leave = nn.Upsample(scale_factor=2), layer(3 * width, width)
        self.last = nn.Conv2d(width, 3, 3, padding=1, padding_mode="circular")

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        high = self.enter(10 * state)  # of order 1
        low = self.bottom(self.down(high))
        return state + 0.1 * self.last(self.leave(torch.cat([high, self.up(low)], 1)))


def total(square: torch.Tensor) -> float:
    """Return the sum over all blocks of one field."""
    return float(fused_all_reduce(square.sum())) / DistributedManager().group_size("data")


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast waves on a field that is split over ranks.")
    parser.add_argument("--rows", type=int, help="ranks along the rows; 2 if that divides the number of ranks")
    parser.add_argument("--columns", type=int, help="ranks along the columns; all that are left")
    parser.add_argument("--snapshots", type=int, default=10, help="of which 4 are forecast")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=16, help="channels of the U-Net")
    parser.add_argument("--losses", type=Path, help="write the loss of each step into this file")
    parser.add_argument("--plot", type=Path, help="draw the last forecast into this file")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    rows = options.rows or (2 if manager.world_size % 2 == 0 else 1)
    columns = options.columns or manager.world_size // rows
    manager.initialize_mesh((-1, rows, columns), ("data", "rows", "columns"))

    snapshots = simulate(options.snapshots)
    volumes = [1 + total(one[-1, 0]) / (GRID[0] * GRID[1]) for one in (snapshots[0], snapshots[-1])]

    torch.manual_seed(0)
    model = manager.wrap_ddp(decompose(UNet(options.width).to(manager.device), DIMS))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    mine = snapshots[:, manager.group_rank("data") : NUM_FIELDS : manager.group_size("data")]
    times = torch.randint(options.snapshots - 1, (options.steps,), generator=torch.Generator().manual_seed(0))
    losses = []
    for time in times.tolist():
        square = (model(mine[time]) - mine[time + 1]).square().sum() / (3 * NUM_FIELDS * GRID[0] * GRID[1])
        (square * manager.world_size).backward()  # gradients are averaged over the ranks
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(fused_all_reduce(square.detach())))

    truth = snapshots[: HORIZON + 1, NUM_FIELDS:]
    forecast = truth[0]
    with torch.no_grad():
        for _ in truth[1:]:
            forecast = model(forecast)
    change = total((truth[-1] - truth[0])[:, 0] ** 2)
    error = (total((forecast - truth[-1])[:, 0] ** 2) / change) ** 0.5
    heights = [gather_domain(one[0, 0].contiguous(), DIMS) for one in (truth[-1], forecast)]
    if manager.is_main:
        sides = f"{manager.group_size('data')} x {rows} x {columns}"
        print(f"{sides} ranks, volume {volumes[0]:.12f}, later {volumes[1]:.12f}")
        print(f"loss {losses[0]:.12f}, at last {losses[-1]:.12f}")
        print(f"error of the forecast {error:.6f}; of no change 1")
        if options.losses:
            options.losses.write_text(json.dumps(losses))
        if options.plot:
            draw(*(one.cpu() for one in heights), options.plot)


def draw(truth: torch.Tensor, forecast: torch.Tensor, path: Path) -> None:
    """Draw heights of the full field; where blocks meet there is nothing to be seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    most = float(truth.abs().max())
    pictures = {"solver": truth, "U-Net": forecast, "difference": forecast - truth}
    for panel, (name, height) in zip(figure.subplots(1, 3), pictures.items(), strict=True):
        image = panel.imshow(height.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        panel.set_title(name)
        panel.set_axis_off()
    figure.colorbar(image, ax=figure.axes, label="height")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
