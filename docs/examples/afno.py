"""Learn to step a turbulent flow with a Fourier neural operator that is split over ranks.

    python docs/examples/afno.py --plot afno.png
    distman run -n 4 docs/examples/afno.py
    distman run -n 4 docs/examples/afno.py --channel 1 --spatial 4
    srun -N2 --ntasks-per-node=2 python docs/examples/afno.py

The data is computed first: two-dimensional Navier-Stokes, pseudo-spectral, on a Fourier transform over all ranks. An
adaptive Fourier neural operator (AFNO) then learns how the vorticity changes in the time between two snapshots. The
ranks are a mesh of three axes. Along "model_parallel" the channels are split, along "spatial_parallel" the columns of
the grid, along "data_parallel" the samples:

    4 ranks, --channel 2 --spatial 1:  model_parallel [0, 1] [2, 3]   data_parallel [0, 2] [1, 3]
    4 ranks, --channel 2 --spatial 2:  model_parallel [0, 1] [2, 3]   spatial_parallel [0, 2] [1, 3]

One process is a mesh of one, and runs the same lines. Numbers are in double precision, so that curves can be compared.

Source: Guibas et al., "Adaptive Fourier Neural Operators", ICLR 2022.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from distman import DistributedManager, fft, mappings
from distman.collectives import fused_all_reduce

GRID = 64  # points along each side of the square, whose length is 2 pi
VISCOSITY = 2e-3
TIME_STEP = 0.005
STEPS_PER_SNAPSHOT = 50
BUDGET_TOLERANCE = 1e-6
PATCH = 4
WIDTH = 48
NUM_BLOCKS = 8
DEPTH = 3
BATCH = 8
STEPS = 300
LEARNING_RATE = 5e-3


class Solver:
    """The vorticity equation on a periodic square.

    Ranks hold fields in shards of rows, their spectra in shards of columns, so that each transform has one
    exchange. All trajectories are computed together, each over all ranks.
    """

    def __init__(self) -> None:
        device = DistributedManager().device
        row = torch.fft.fftfreq(GRID, 1 / GRID, device=device)[:, None]
        column = torch.fft.rfftfreq(GRID, 1 / GRID, device=device)
        column = mappings.scatter_to_parallel_region(column, dim=0)
        self.square = row**2 + column**2
        self.inverse = torch.where(self.square > 0, 1 / self.square, 0.0)
        self.kept = (
            (self.square > 0) & (row.abs() < GRID / 3) & (column < GRID / 3)
        )  # products of two fields are then free of aliases
        self.weight = torch.where(column > 0, 1.0, 0.5) / GRID**4  # column k stands for -k too
        self.velocity = torch.stack([1j * column * self.inverse, -1j * row * self.inverse])[:, None]
        self.gradient = torch.stack(torch.broadcast_tensors(1j * row, 1j * column))[:, None]
        self.decay = torch.exp(-VISCOSITY * self.square * TIME_STEP / 2)  # over half a step

    def start(self, num_trajectories: int) -> torch.Tensor:
        """Return the spectra of random vorticities, the same on any number of ranks."""
        noise = torch.randn(num_trajectories, GRID, GRID, generator=torch.Generator().manual_seed(0))
        rows = mappings.scatter_to_parallel_region(noise.to(self.square.device), dim=-2)
        spectrum = fft.rfft2(rows) * self.kept * torch.exp(-((self.square.sqrt() - 4) ** 2))
        enstrophy = fused_all_reduce(self.measure(spectrum))[1]
        return spectrum * (8 / enstrophy).sqrt()[:, None, None]

    def step(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Advance by one step of Runge-Kutta of fourth order, exact in the viscous term."""
        half, full, dt = self.decay, self.decay**2, TIME_STEP
        first = self.advect(spectrum)
        second = self.advect(half * (spectrum + dt / 2 * first))
        third = self.advect(half * spectrum + dt / 2 * second)
        fourth = self.advect(full * spectrum + dt * half * third)
        return full * spectrum + dt / 6 * (full * first + 2 * half * (second + third) + fourth)

    def advect(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return the rate of change by the flow alone."""
        velocity, gradient = fft.irfft2(torch.stack([self.velocity * spectrum, self.gradient * spectrum]))
        return -fft.rfft2((velocity * gradient).sum(dim=0)) * self.kept

    def measure(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of energy, enstrophy and palinstrophy of every trajectory."""
        enstrophy = self.weight * spectrum.abs() ** 2
        return torch.stack([enstrophy * self.inverse, enstrophy, enstrophy * self.square]).sum(dim=(-2, -1))

    def fields(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return vorticity and velocity, whole on every rank: (trajectory, field, row, column)."""
        fields = fft.irfft2(torch.cat([spectrum[None], self.velocity * spectrum]))
        return mappings.gather_from_parallel_region(fields.transpose(0, 1), dim=-2)


def simulate(num_trajectories: int, num_snapshots: int) -> tuple[torch.Tensor, list[float]]:
    """Return the snapshots (trajectory, time, field, row, column) and the relative errors of the two budgets."""
    solver = Solver()
    spectrum = solver.start(num_trajectories)
    snapshots, history = [solver.fields(spectrum)], [solver.measure(spectrum)]
    for _ in range(1, num_snapshots):
        for _ in range(STEPS_PER_SNAPSHOT):
            spectrum = solver.step(spectrum)
            history.append(solver.measure(spectrum))
        snapshots.append(solver.fields(spectrum))
    return torch.stack(snapshots, dim=1), check_budgets(fused_all_reduce(torch.stack(history)))


def check_budgets(history: torch.Tensor) -> list[float]:
    """Make sure that energy and enstrophy go where viscosity takes them, and nowhere else."""
    simpson = torch.ones(len(history), device=history.device)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    lost = 2 * VISCOSITY * TIME_STEP / 3 * torch.einsum("t,tqb->qb", simpson, history[:, 1:])
    change = history[-1, :2] - history[0, :2]
    errors = ((change + lost) / change).abs().amax(dim=1).tolist()
    for name, error in zip(("energy", "enstrophy"), errors, strict=True):
        if not error < BUDGET_TOLERANCE:
            raise RuntimeError(f"{name} budget must close to {BUDGET_TOLERANCE}, got {error:.1e}. Lower TIME_STEP.")
    return errors


def make_model() -> fft.DistributedAFNO:
    """Return the operator, from vorticity and velocity to the change of the vorticity, on this rank's columns."""
    torch.manual_seed(0)
    sizes = {"patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_blocks": NUM_BLOCKS, "mlp_ratio": 2}
    # The flow knows no corner: nor does a model without positions.
    model = fft.DistributedAFNO((GRID, GRID), in_channels=3, out_channels=1, positions=False, **sizes)
    return model.to(DistributedManager().device)


def my_samples(samples: torch.Tensor) -> torch.Tensor:
    """Return the samples for this rank's copy of the model; the shares may differ in size."""
    manager = DistributedManager()
    return samples[manager.group_rank("data_parallel") :: manager.group_size("data_parallel")]


def my_columns(model: fft.DistributedAFNO, x: torch.Tensor) -> torch.Tensor:
    """Return the columns of the grid that are this rank's: whole patches."""
    return x.split(model.column_sizes, dim=-1)[DistributedManager().group_rank("spatial_parallel")]


@dataclass(frozen=True)
class Scales:
    """Root mean squares over the training data, so that a forecast of no change has the loss 1."""

    fields: torch.Tensor
    change: torch.Tensor

    @classmethod
    def of(cls, snapshots: torch.Tensor) -> Scales:
        vorticity = snapshots[:, :, 0]
        change = vorticity[:, 1:] - vorticity[:, :-1]
        return cls(snapshots.square().mean(dim=(0, 1, 3, 4))[:, None, None].sqrt(), change.square().mean().sqrt())


def train_step(
    model: fft.DistributedAFNO, optimizer: torch.optim.Optimizer, snapshots: torch.Tensor, scales: Scales, step: int
) -> float:
    """Learn from a batch that all ranks draw alike and share; return its mean loss."""
    generator = torch.Generator().manual_seed(step)
    pairs = torch.randint(snapshots[:, 1:, 0, 0, 0].numel(), (BATCH,), generator=generator)
    shifts = torch.randint(GRID, (2,), generator=generator).tolist()  # the flow knows no corner: every shift is data
    before, after = (fields[my_samples(pairs)].roll(shifts, dims=(-2, -1)) for fields in successive(snapshots))
    prediction = forecast(model, before, scales)
    errors = (prediction - my_columns(model, after[:, 0])) / scales.change
    loss = errors.square().sum() / (BATCH * GRID**2)  # this rank's part of the mean over the whole batch
    optimizer.zero_grad()
    loss.backward()
    parameters = list(model.parameters())
    # Ranks that hold the same slices saw other samples: their parts add up, all in one message.
    gradients = fused_all_reduce([one.grad for one in parameters], group="data_parallel")
    total = fused_all_reduce(loss.detach(), group="replicas")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return total.item()


def successive(snapshots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all snapshots that have a next one, and the next ones."""
    return snapshots[:, :-1].flatten(0, 1), snapshots[:, 1:].flatten(0, 1)


def forecast(model: fft.DistributedAFNO, before: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Return the vorticity one snapshot later, on this rank's columns."""
    before = my_columns(model, before)
    return before[:, 0] + model(before / scales.fields)[:, 0] * scales.change


@torch.no_grad()
def measure_errors(model: fft.DistributedAFNO, snapshots: torch.Tensor, scales: Scales) -> tuple[float, float]:
    """Return the relative error of the model's forecasts, and of the forecast that nothing changes."""
    before, after = (my_samples(fields) for fields in successive(snapshots))
    truth = my_columns(model, after[:, 0])
    differences = [forecast(model, before, scales) - truth, my_columns(model, before[:, 0]) - truth, truth]
    squares = torch.stack([difference.square().sum() for difference in differences])
    of_model, of_persistence, of_truth = fused_all_reduce(squares, group="replicas").tolist()
    return math.sqrt(of_model / of_truth), math.sqrt(of_persistence / of_truth)


@torch.no_grad()
def draw(file: Path, model: fft.DistributedAFNO, snapshots: torch.Tensor, scales: Scales) -> None:
    """Draw one forecast; all ranks make it, and rank 0 writes the file."""
    before, after = (fields[len(fields) // 2][None] for fields in successive(snapshots))
    parts = forecast(model, before, scales)
    prediction = mappings.gather_from_parallel_region(parts, group="spatial_parallel")[0].cpu()
    if DistributedManager().is_main:
        plot(file, after[0, 0].cpu(), prediction)


def plot(file: Path, truth: torch.Tensor, prediction: torch.Tensor) -> None:
    from matplotlib.figure import Figure  # needed for the picture alone

    figure = Figure(figsize=(15, 4.35), layout="constrained")
    limit = truth.abs().max().item()
    error = prediction - truth
    panels = {
        "truth": (truth, limit),
        "prediction": (prediction, limit),
        "error: prediction - truth": (error, error.abs().max().item()),
    }
    for axes, (title, (field, bound)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        sides = (0, 2 * torch.pi, 0, 2 * torch.pi)
        image = axes.imshow(field.cpu().T, origin="lower", extent=sides, cmap="RdBu_r", vmin=-bound, vmax=bound)
        axes.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=axes, label="vorticity")
    figure.savefig(file, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, help="ranks that share the channels; 2 if the world is even, else 1")
    parser.add_argument("--spatial", type=int, default=1, help="ranks that share the columns of the grid")
    parser.add_argument(
        "--trajectories", type=int, default=16, help="flows to compute, 2 at least; a quarter is for the test"
    )
    parser.add_argument("--snapshots", type=int, default=11, help="snapshots of each flow, 50 solver steps apart")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the optimizer")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the loss of every step there, as JSON")
    parser.add_argument("--flow", type=Path, metavar="FILE", help="write the snapshots there, for torch.load()")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw truth, prediction and error there")
    return parser.parse_args()


def make_groups(channel: int | None, spatial: int) -> None:
    manager = DistributedManager.initialize()
    channel = channel or (2 if manager.world_size % 2 == 0 else 1)
    manager.initialize_mesh((-1, spatial, channel), ("data_parallel", "spatial_parallel", "model_parallel"))
    manager.create_orthogonal_process_group("replicas", "model_parallel")
    if manager.is_main:
        sizes = " x ".join(map(str, manager.mesh_sizes()))
        print(f"{sizes} ranks: data parallel x spatial parallel x model parallel", flush=True)


def train(
    options: argparse.Namespace, snapshots: torch.Tensor, scales: Scales
) -> tuple[fft.DistributedAFNO, list[float]]:
    """Return the trained operator and the loss of every step."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    losses = []
    for step in range(1, options.steps + 1):
        losses.append(train_step(model, optimizer, snapshots, scales, step))
        schedule.step()
        if DistributedManager().is_main and (step % 20 == 0 or step == options.steps):
            print(f"step {step}/{options.steps}  mean loss {fmean(losses[-20:]):.12f}", flush=True)
    return model, losses


def main() -> None:
    options = parse_arguments()
    torch.set_default_dtype(torch.float64)
    make_groups(options.channel, options.spatial)
    snapshots, (energy, enstrophy) = simulate(options.trajectories, options.snapshots)
    is_main = DistributedManager().is_main
    if is_main:
        print(f"budgets close to {energy:.1e} (energy) and {enstrophy:.1e} (enstrophy)", flush=True)
    num_test = max(1, options.trajectories // 4)
    scales = Scales.of(snapshots[:-num_test])
    model, losses = train(options, snapshots[:-num_test], scales)
    error, persistence = measure_errors(model, snapshots[-num_test:], scales)
    if is_main:
        print(f"error on flows not seen {error:.4f}, of the forecast of no change {persistence:.4f}", flush=True)
    if options.plot:
        draw(options.plot, model, snapshots[-num_test:], scales)
    if options.losses and is_main:
        options.losses.write_text(json.dumps(losses))
    if options.flow and is_main:
        torch.save(snapshots.cpu(), options.flow)


if __name__ == "__main__":
    main()
