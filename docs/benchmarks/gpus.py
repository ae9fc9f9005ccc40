"""What distman costs on GPUs, against bare NCCL, and against physicsnemo where it is installed.

    distman run -n gpu docs/benchmarks/gpus.py   # a minute
    distman run -n 2 docs/benchmarks/gpus.py --rounds 1   # on the CPU over gloo, to try it

It prints tables in Markdown. The competitors take turns within one run; a figure is the median over the rounds of the
slowest rank's time, and a ratio the median of the rounds' ratios to the first.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.collectives import all_gather_v, fused_all_reduce
from distman.handler import Callback, NNHandler

MEGABYTES = (1, 64)
BURST = 5
NUM_SCALARS = 50
WIDTH, BATCH, STEPS = 2048, 256, 50

Competitors = dict[str, Callable[[], object]]


def finish() -> None:
    """Wait for what the GPU was told to do."""
    if DistributedManager().device.type != "cpu":
        torch.accelerator.synchronize()


def race(title: str, competitors: Competitors, rounds: int) -> None:
    seconds = torch.zeros(len(competitors), rounds + 1, dtype=torch.float64)
    for number in range(rounds + 1):
        for index, compete in enumerate(competitors.values()):
            dist.barrier()
            finish()
            started = time.perf_counter()
            for _ in range(BURST):
                compete()
            finish()
            seconds[index, number] = (time.perf_counter() - started) / BURST
    show(title, list(competitors), seconds[:, 1:])  # the first round warms up


def show(title: str, names: list[str], seconds: torch.Tensor) -> None:
    """Print the slowest rank's medians, and the ratios to the first; shape of the times ``(competitors, rounds)``."""
    seconds = seconds.to(DistributedManager().device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if not DistributedManager().is_main:
        return
    first, *_ = rows = seconds.tolist()
    print(f"\n{title}:\n\n| what | time | ratio |\n| --- | --- | --- |")
    for name, row in zip(names, rows, strict=True):
        ratio = statistics.median(one / reference for one, reference in zip(row, first, strict=True))
        print(f"| {name} | {statistics.median(row) * 1e3:.3f} ms | {ratio:.2f} |", flush=True)


def measure_all_gather(rounds: int) -> None:
    manager = DistributedManager()
    physicsnemo = load_physicsnemo()
    for megabytes in MEGABYTES:
        even = megabytes * 2**20 // 4 // manager.world_size
        uneven = [even + even // 2 * (1 if rank % 2 else -1) for rank in range(manager.world_size)]
        for kind, sizes in (("equal", [even] * manager.world_size), ("unequal", uneven)):
            shard = torch.full((sizes[manager.rank],), float(manager.rank), device=manager.device)
            padded = torch.zeros(max(sizes), device=manager.device)

            def bare(shard: torch.Tensor = shard, sizes: list[int] = sizes) -> torch.Tensor:
                full = shard.new_empty(sum(sizes))
                dist.all_gather_into_tensor(full, shard)
                return full

            def by_padding(
                shard: torch.Tensor = shard, sizes: list[int] = sizes, padded: torch.Tensor = padded
            ) -> torch.Tensor:
                padded[: len(shard)] = shard
                full = padded.new_empty(len(sizes) * len(padded))
                dist.all_gather_into_tensor(full, padded)
                return torch.cat([part[:size] for part, size in zip(full.chunk(len(sizes)), sizes, strict=True)])

            competitors: Competitors = {"bare": bare} if kind == "equal" else {"padded, bare": by_padding}
            competitors["distman"] = lambda shard=shard, sizes=sizes: all_gather_v(shard, sizes)
            if physicsnemo and manager.device.type == "cuda":
                competitors["physicsnemo"] = lambda shard=shard, sizes=sizes: physicsnemo.all_gather_v(shard, sizes)
            race(f"`all_gather_v` of {kind} shards, {megabytes} MB, {manager.world_size} ranks", competitors, rounds)


def measure_fused(rounds: int) -> None:
    manager = DistributedManager()
    packed = torch.ones(NUM_SCALARS, device=manager.device)
    scalars = {f"metric {number}": torch.tensor(float(number), device=manager.device) for number in range(NUM_SCALARS)}
    competitors: Competitors = {
        "one all_reduce, packed before": lambda: dist.all_reduce(packed),
        "distman": lambda: fused_all_reduce(scalars),
    }
    if (physicsnemo := load_physicsnemo()) and manager.device.type == "cuda":
        competitors["physicsnemo"] = lambda: physicsnemo.fused_all_reduce(scalars)
    race(f"`fused_all_reduce` of {NUM_SCALARS} scalars, {manager.world_size} ranks", competitors, rounds)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


class LoopByHand(Callback):
    """After each of the handler's epochs, one of a loop with DDP over as many batches; both timed."""

    def __init__(self) -> None:
        manager = DistributedManager()
        self.batch = [torch.randn(BATCH, 64), torch.randn(BATCH, 8)]
        if manager.cuda:
            self.batch = [tensor.pin_memory() for tensor in self.batch]
        self.model = manager.wrap_ddp(make_network().to(manager.device))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.seconds: list[tuple[float, float]] = []
        self.started = 0.0

    def on_epoch_begin(self, *_: object) -> None:
        dist.barrier()
        finish()
        self.started = time.perf_counter()

    def on_epoch_end(self, *_: object) -> None:
        finish()
        by_handler = time.perf_counter() - self.started
        dist.barrier()
        finish()
        started = time.perf_counter()
        for _ in range(STEPS):
            inputs, targets = (tensor.to(DistributedManager().device, non_blocking=True) for tensor in self.batch)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(inputs), targets).backward()
            self.optimizer.step()
        finish()
        self.seconds.append((time.perf_counter() - started, by_handler))


def measure_steps(epochs: int) -> None:
    world_size = DistributedManager().world_size
    num_samples = BATCH * STEPS * world_size
    handler = NNHandler(make_network)
    handler.set_optimizer(torch.optim.Adam)
    handler.set_loss_fn(nn.functional.mse_loss)
    data = TensorDataset(torch.randn(num_samples, 64), torch.randn(num_samples, 8))
    handler.set_train_loader(data, batch_size=BATCH, cached=True)
    by_hand = LoopByHand()
    handler.add_callback(by_hand)
    handler.train(epochs + 1)
    seconds = torch.tensor(by_hand.seconds[1:], dtype=torch.float64).T / STEPS
    show(f"a training step, {world_size} ranks", ["DDP, by hand", "NNHandler"], seconds.contiguous())


def load_physicsnemo() -> Any:
    """Return ``physicsnemo.distributed``; None where it is not installed."""
    try:
        return importlib.import_module("physicsnemo.distributed.utils")
    except ImportError:
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of each race, and epochs; %(default)s if left out")
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore", FutureWarning)  # a new torch renames all_gather_into_tensor
    DistributedManager.initialize()
    measure_all_gather(rounds)
    measure_fused(rounds)
    measure_steps(rounds)
