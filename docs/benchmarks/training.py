"""What training through the handler costs, against loops written by hand.

    python docs/benchmarks/training.py               # everything, four minutes on two cores
    python docs/benchmarks/training.py step peers loader saving sharded sampling

The competitors take turns within one run. The time of a step is the mean over an epoch, on the slowest rank. Every
figure is a median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensors
from torch import nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distman import DistributedManager
from distman.checkpoint import save, save_sharded
from distman.collectives import broadcast_data
from distman.data import rank_cached_loader
from distman.handler import Callback, NNHandler
from distman.score import VarianceExploding, sample

MODELS = {"small": (64, 256, 100), "large": (64, 1152, 25)}  # batch of each rank, width, steps in an epoch
ROUNDS = 25
LOADER_SAMPLES, LOADER_BATCH, LOADER_ROUNDS = 20_000, 64, 40
SAVED_BYTES, SAVE_ROUNDS = 256 * 2**20, 7
NUM_SAMPLES, SAMPLING_STEPS, SAMPLING_BATCH, SAMPLING_ROUNDS = 8192, 50, 1024, 7

Prepared = tuple[nn.Module, torch.optim.Optimizer, Iterable[Any], Callable[[torch.Tensor], Any]]
"""A model, its optimizer, a loader, and what computes the gradient of a loss."""


# --- on the ranks of a job -------------------------------------------------------------------------------------------


def make_network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


class HandWrittenLoop(Callback):
    """After each of the handler's epochs, one of a loop over tensors with a DDP model."""

    def __init__(self, data: TensorDataset, batch: int, width: int) -> None:
        manager = DistributedManager()
        self.inputs, self.targets = (tensor[manager.rank :: manager.world_size].clone() for tensor in data.tensors)
        self.batch = batch
        self.model = manager.wrap_ddp(make_network(width))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.seconds: list[float] = []

    def on_epoch_begin(self, handler: NNHandler, epoch: int) -> None:
        dist.barrier()

    def on_epoch_end(self, handler: NNHandler, record: dict[str, float]) -> None:
        dist.barrier()
        started = time.perf_counter()
        total = torch.zeros(())
        for part in torch.randperm(len(self.inputs)).split(self.batch):
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(self.inputs[part]), self.targets[part])
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        self.seconds.append(time.perf_counter() - started)


def measure_steps_on_this_rank() -> None:
    manager = DistributedManager.initialize()
    for name, (batch, width, num_steps) in MODELS.items():
        num_samples = batch * num_steps * manager.world_size
        data = TensorDataset(torch.randn(num_samples, 64), torch.randn(num_samples, 8))
        handler = NNHandler(make_network, width=width)
        handler.set_optimizer(torch.optim.Adam)
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(data, batch_size=batch, cached=True)
        by_hand = HandWrittenLoop(data, batch, width)
        handler.add_callback(by_hand)
        history = handler.train(ROUNDS + 1)
        seconds = torch.tensor([by_hand.seconds, history["seconds"]], dtype=torch.float64) / num_steps
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        rows = dict(zip(("DDP, by hand", "NNHandler"), seconds[:, 1:].tolist(), strict=True))
        show(f"a step of the {name} model, {manager.world_size} ranks", rows)


class LoopOverLoader(Callback):
    """After each of the handler's epochs, one of a loop over an ordinary loader, as a library has prepared it."""

    def __init__(self, prepared: Prepared) -> None:
        self.model, self.optimizer, self.loader, self.backward = prepared
        self.seconds: list[float] = []

    def on_epoch_end(self, handler: NNHandler, record: dict[str, float]) -> None:
        dist.barrier()
        started = time.perf_counter()
        total = torch.zeros(())
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.backward(loss)
            self.optimizer.step()
            total += loss.detach()
        self.seconds.append(time.perf_counter() - started)


def prepare_by_hand(model: nn.Module, data: TensorDataset, batch: int) -> Prepared:
    model = DistributedManager().wrap_ddp(model)
    loader = DataLoader(data, batch, sampler=DistributedSampler(data))
    return model, torch.optim.Adam(model.parameters()), loader, torch.Tensor.backward


def prepare_by_accelerate(model: nn.Module, data: TensorDataset, batch: int) -> Prepared:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    optimizer = torch.optim.Adam(model.parameters())
    prepared = accelerator.prepare(model, optimizer, DataLoader(data, batch, shuffle=True))
    return *prepared, accelerator.backward


def prepare_by_fabric(model: nn.Module, data: TensorDataset, batch: int) -> Prepared:
    fabrics = importlib.import_module("lightning_fabric")
    fabric = fabrics.Fabric(accelerator="cpu", strategy="ddp", devices=DistributedManager().world_size)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(data, batch, shuffle=True))
    return model, optimizer, loader, fabric.backward


def measure_peers_on_this_rank() -> None:
    """Train with the ordinary loader of torch, which all can take; accelerate and Fabric where they are installed."""
    manager = DistributedManager.initialize()
    ways = {"DDP, by hand": prepare_by_hand, "accelerate": prepare_by_accelerate, "Fabric": prepare_by_fabric}
    needs = {"accelerate": "accelerate", "Fabric": "lightning_fabric"}
    for name, (batch, width, num_steps) in MODELS.items():
        num_samples = batch * num_steps * manager.world_size
        data = TensorDataset(torch.randn(num_samples, 64), torch.randn(num_samples, 8))
        loops = {
            way: LoopOverLoader(prepare(make_network(width), data, batch))
            for way, prepare in ways.items()
            if way not in needs or importlib.util.find_spec(needs[way]) is not None
        }
        handler = NNHandler(make_network, width=width)
        handler.set_optimizer(torch.optim.Adam)
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(data, batch_size=batch, num_workers=0)
        for loop in loops.values():
            handler.add_callback(loop)
        history = handler.train(ROUNDS + 1)
        times = {way: loop.seconds for way, loop in loops.items()} | {"NNHandler": history["seconds"]}
        seconds = torch.tensor([*times.values()], dtype=torch.float64) / num_steps
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        rows = dict(zip(times, seconds[:, 1:].tolist(), strict=True))
        show(f"a step of the {name} model with an ordinary loader, {manager.world_size} ranks", rows)


def measure_sampling_on_this_rank() -> None:
    manager = DistributedManager.initialize()
    network = make_network(512)
    sde = VarianceExploding()

    def score_fn(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return network(nn.functional.pad(x, (0, 56))) - x / (1 + t[:, None])

    def draw(*, rank_zero: bool) -> None:
        dist.barrier()
        sample(
            score_fn, sde, (NUM_SAMPLES, 8), num_steps=SAMPLING_STEPS, batch_size=SAMPLING_BATCH, rank_zero=rank_zero
        )

    competitors = {
        "rank 0 alone": lambda: draw(rank_zero=True),
        "all ranks": lambda: draw(rank_zero=False),
    }
    title = f"{NUM_SAMPLES} samples in {SAMPLING_STEPS} steps, {manager.world_size} ranks"
    race(title, competitors, SAMPLING_ROUNDS)


# --- in this process -------------------------------------------------------------------------------------------------


def show(title: str, seconds: dict[str, list[float]]) -> None:
    if not DistributedManager().is_main:
        return
    print(title)
    reference = next(iter(seconds.values()))
    for name, values in seconds.items():
        ratio = statistics.median(value / bare for value, bare in zip(values, reference, strict=True))
        print(f"  {name:<45} {statistics.median(values) * 1e3:9.3f} ms   {ratio:7.3f}", flush=True)


def race(title: str, competitors: dict[str, Callable[[], object]], rounds: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(rounds + 1):
        for name, compete in competitors.items():
            started = time.perf_counter()
            compete()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    show(title, seconds)


def measure_loaders() -> None:
    torch.set_num_threads(1)
    DistributedManager.initialize()
    images, labels = torch.randn(LOADER_SAMPLES, 1, 8, 8), torch.randint(10, (LOADER_SAMPLES,))
    data = TensorDataset(images, labels)
    cached = rank_cached_loader(data, batch_size=LOADER_BATCH)
    plain = DataLoader(data, batch_size=LOADER_BATCH, shuffle=True)

    def slice_by_hand() -> None:
        for part in torch.randperm(LOADER_SAMPLES).split(LOADER_BATCH):
            images[part], labels[part]

    def go_through(loader: DataLoader) -> None:
        for _ in loader:
            pass

    competitors = {
        "tensors sliced by hand": slice_by_hand,
        "rank_cached_loader": lambda: go_through(cached),
        "torch's DataLoader": lambda: go_through(plain),
    }
    race(f"an epoch of {LOADER_SAMPLES} images of 8 x 8, batches of {LOADER_BATCH}", competitors, LOADER_ROUNDS)


def measure_saving() -> None:
    DistributedManager.initialize()
    state = {f"weight {number}": torch.randn(SAVED_BYTES // 16 // 4) for number in range(16)}
    kept: list[dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"

        def copy() -> None:
            kept[:] = [{name: value.clone() for name, value in state.items()}]

        seconds: dict[str, list[float]] = {"copy to host memory": [], "save in the background": [], "save": []}
        for number in range(SAVE_ROUNDS + 1):
            for name, work in (
                ("copy to host memory", copy),
                ("save in the background", lambda: save(state, path, background=True)),
                ("save", lambda: save(state, path)),
            ):
                started = time.perf_counter()
                pending = work()
                elapsed = time.perf_counter() - started
                if pending is not None:
                    pending.wait()
                if number:
                    seconds[name].append(elapsed)
        show(f"saving {SAVED_BYTES // 2**20} MB, one process", seconds)


def measure_sharded_saving_on_this_rank() -> None:
    manager = DistributedManager.initialize()
    mesh = manager.initialize_mesh((-1,), ("shards",))
    group = dist.new_group(backend="gloo")  # torch's threads must have one of their own
    shape = (SAVED_BYTES // 16 // 4 // 1024 * manager.world_size, 1024)
    state: dict[str, Any] = {f"weight {n}": dtensors.distribute_tensor(torch.randn(shape), mesh) for n in range(16)}
    kept: list[list[torch.Tensor]] = []
    folders = tempfile.TemporaryDirectory() if manager.is_main else contextlib.nullcontext()
    with folders as made:
        folder = broadcast_data(made)

        def copy() -> None:
            kept[:] = [[value.to_local().clone() for value in state.values()]]

        competitors: dict[str, Callable[[], Callable[[], Any] | None]] = {
            "copy of the shards": copy,
            "save_sharded in the background": lambda: save_sharded(state, f"{folder}/ours", background=True).wait,
            "torch's async_save": lambda: (
                checkpoint.async_save(state, checkpoint_id=f"{folder}/torch", process_group=group).result
            ),
        }
        seconds: dict[str, list[float]] = {name: [] for name in competitors}
        for number in range(SAVE_ROUNDS + 1):
            names = [*competitors]
            for name in names[number % 3 :] + names[: number % 3]:  # what was written before weighs on the next one
                manager.barrier()
                started = time.perf_counter()
                wait = competitors[name]()
                elapsed = time.perf_counter() - started
                if wait is not None:
                    wait()
                if number:
                    seconds[name].append(elapsed)
        manager.barrier()
    if manager.is_main:
        show(f"saving {SAVED_BYTES // 2**20} MB of each rank, {manager.world_size} ranks", seconds)


def launch(name: str, num_ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port=29500", f"--nproc_per_node={num_ranks}"]
    subprocess.run([*command, __file__, "--rank", name], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


ON_RANKS = {
    "step": (measure_steps_on_this_rank, (2,)),
    "peers": (measure_peers_on_this_rank, (2,)),
    "sharded": (measure_sharded_saving_on_this_rank, (2,)),
    "sampling": (measure_sampling_on_this_rank, (2, 4)),
}
IN_THIS_PROCESS = {"loader": measure_loaders, "saving": measure_saving}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*ON_RANKS, *IN_THIS_PROCESS]
    parser.add_argument("what", nargs="*", choices=[*choices, []], help="what to measure; everything if left out")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.what or choices:
        if name in IN_THIS_PROCESS:
            IN_THIS_PROCESS[name]()
        elif arguments.rank:
            ON_RANKS[name][0]()
        else:
            for num_ranks in ON_RANKS[name][1]:
                launch(name, num_ranks)


if __name__ == "__main__":
    main()
