"""Follow a soliton of the nonlinear Schroedinger equation on a grid that is split over the ranks.

    python docs/examples/schroedinger.py
    distman run -n 2 docs/examples/schroedinger.py --rows 96 --columns 1024
    distman run -n 4 docs/examples/schroedinger.py

The equation i u_t + (u_xx + u_yy) / 2 + |u|^2 u = 0 is solved by splitting: the kinetic part is exact in the spectrum,
the other one on the grid. Each rank has some rows of the grid, and some columns of the spectrum, so that a transform
exchanges the data once. A wave that moves without changing its shape is an exact solution, with which the result is
compared. Halving the time step divides the error by 16. The numbers do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import math

import torch

from distman import DistributedManager, fft, mappings
from distman.collectives import fused_all_reduce

LENGTH = 48.0  # along x: at its ends the soliton, which falls like exp(-|x|), is below 1e-10
HEIGHT = 2 * math.pi  # along y
SPEED = 2 * math.pi * 4 / LENGTH  # whole waves fit into the box
WAVES = 2  # along y
END = 2.0

# Four symmetric steps and one backwards, of which the errors of third order cancel. Source: Suzuki, 1990.
PART = 1 / (4 - 4 ** (1 / 3))
PARTS = (PART, PART, 1 - 4 * PART, PART, PART)


def soliton(x: torch.Tensor, y: torch.Tensor, t: float) -> torch.Tensor:
    """Return the exact solution; the box is periodic in x."""
    distance = (x - SPEED * t + LENGTH / 2) % LENGTH - LENGTH / 2
    phase = SPEED * x + WAVES * y + (1 - SPEED**2 - WAVES**2) * t / 2
    return torch.polar(1 / distance.cosh(), phase)


def my_part(line: torch.Tensor) -> torch.Tensor:
    """Return the points of a line of the grid, or of the spectrum, that are on this rank."""
    return mappings.scatter_to_parallel_region(line, dim=0)


def solve(u: torch.Tensor, kinetic: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return the wave at the end. `u` holds rows of the grid, `kinetic` the energy of columns of the spectrum."""
    dt = END / num_steps
    for _ in range(num_steps):
        for part in PARTS:
            u = u * torch.exp(0.5j * part * dt * u.abs() ** 2)
            # fft2 leaves columns on each rank and ifft2 takes them: neither needs to be told a layout.
            u = fft.ifft2(fft.fft2(u) * torch.exp(-1j * part * dt * kinetic))
            u = u * torch.exp(0.5j * part * dt * u.abs() ** 2)
    return u


def main() -> None:
    parser = argparse.ArgumentParser(description="Follow a soliton of the nonlinear Schroedinger equation.")
    parser.add_argument("--rows", type=int, default=24, help="points along y")
    parser.add_argument("--columns", type=int, default=512, help="points along x")
    parser.add_argument("--steps", type=int, default=80, help="steps of time")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    manager = DistributedManager.initialize()
    x = (torch.arange(options.columns, device=manager.device) / options.columns - 0.5) * LENGTH
    y = my_part(torch.arange(options.rows, device=manager.device) * HEIGHT / options.rows)[:, None]
    along_x = my_part(torch.fft.fftfreq(options.columns, LENGTH / options.columns, device=manager.device))
    along_y = torch.fft.fftfreq(options.rows, HEIGHT / options.rows, device=manager.device)[:, None]
    kinetic = (2 * math.pi) ** 2 * (along_x**2 + along_y**2) / 2

    wave = solve(soliton(x, y, 0.0), kinetic, options.steps)
    exact = soliton(x, y, END)
    squares = torch.stack([(wave - exact).abs().square().sum(), exact.abs().square().sum(), wave.abs().square().sum()])
    error, norm, mass = fused_all_reduce(squares).tolist()
    if manager.is_main:
        print(f"{options.rows} x {options.columns} points on {manager.world_size} ranks, {options.steps} steps")
        print(f"relative error {math.sqrt(error / norm):.6e}, of the mass {abs(mass / norm - 1):.1e}")


if __name__ == "__main__":
    main()
