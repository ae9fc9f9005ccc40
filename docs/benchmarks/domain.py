"""What a halo exchange costs, forward and backward, against isend and irecv by hand; and the step of a U-Net.

    python docs/benchmarks/domain.py                    # 2 and 4 ranks, halos 1 and 3
    python docs/benchmarks/domain.py --ranks 2 --size 1024
    python docs/benchmarks/domain.py --unet --ranks 2 --size 256

Both take turns within one run, with one thread per rank. Each figure is the median over the rounds of the slowest
rank's time, in milliseconds, beside the best round. The rows of the field are split over the ranks; by hand, halos are
received and joined with the shard, and in the backward pass sent back and added to a copy of its gradient.

With --unet, forward, backward and an optimizer's step of a decomposed U-Net take turns with the whole field on rank 0,
while the others wait, and with blocks that know nothing of each other, which is the best that the machine can do. The
CPU's time is that of the rank that took most of it, which other work on the machine does not lengthen much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import distman
from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.domain import decompose, halo_exchange


def swap(up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Send rows to the ranks before and behind, and return theirs; zeros at the ends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    from_up, from_down = torch.zeros_like(up), torch.zeros_like(down)
    works = []
    if rank > 0:
        works += [dist.P2POp(dist.isend, up, rank - 1), dist.P2POp(dist.irecv, from_up, rank - 1)]
    if rank < size - 1:
        works += [dist.P2POp(dist.isend, down, rank + 1), dist.P2POp(dist.irecv, from_down, rank + 1)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return from_up, from_down


class ByHand(torch.autograd.Function):
    """A halo exchange as it is written in many programs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, halo: int) -> torch.Tensor:
        ctx.halo = halo
        from_up, from_down = swap(tensor[:halo].contiguous(), tensor[-halo:].contiguous())
        return torch.cat([from_up, tensor, from_down])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        halo = ctx.halo
        from_up, from_down = swap(grad[:halo].contiguous(), grad[-halo:].contiguous())
        total = grad[halo:-halo].clone()
        total[:halo] += from_up
        total[-halo:] += from_down
        return total, None


def timed(exchange: Callable[[torch.Tensor], torch.Tensor], field: torch.Tensor, weights: torch.Tensor) -> float:
    """Return the time of the slowest rank, for one exchange, forward and backward."""
    field.grad = None
    dist.barrier()
    start = time.perf_counter()
    exchange(field).backward(weights)
    return float(max(all_gather_objects(time.perf_counter() - start)))


def measure(size: int, halo: int, rounds: int) -> None:
    """Print a line of the table, on the ranks of a job."""
    torch.set_num_threads(1)
    manager = DistributedManager.initialize()
    sizes = distman.split_sizes(size, manager.world_size)
    field = torch.randn(sizes[manager.rank], size, 8, requires_grad=True)
    weights = torch.randn(sizes[manager.rank] + 2 * halo, size, 8)
    ways = {
        "distman": lambda one: halo_exchange(one, halo, 0, sizes=sizes),
        "by hand": lambda one: ByHand.apply(one, halo),
    }
    if not torch.equal(*[way(field) for way in ways.values()]):
        raise ValueError("both ways must give one result, got different ones")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(1000 * timed(way, field, weights))
    if manager.is_main:
        shown = [f"{name} {statistics.median(one):.1f} ({min(one):.1f})" for name, one in times.items()]
        ratio = statistics.median(times["distman"]) / statistics.median(times["by hand"])
        print(f"{manager.world_size} ranks, halo {halo}: {', '.join(shown)} ms, {ratio:.2f}", flush=True)


def layer(num_inputs: int, num_outputs: int, stride: int = 1) -> torch.nn.Sequential:
    convolve = torch.nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1)
    return torch.nn.Sequential(convolve, torch.nn.GroupNorm(4, num_outputs), torch.nn.SiLU())


class UNet(torch.nn.Module):
    """With two levels below the field, the channels doubled on each."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = layer(4, width), layer(width, 2 * width, 2)
        self.third, self.bottom = layer(2 * width, 4 * width, 2), layer(4 * width, 4 * width)
        self.up = torch.nn.Upsample(scale_factor=2, mode="bilinear")
        self.fourth, self.fifth = layer(6 * width, 2 * width), layer(3 * width, width)
        self.last = torch.nn.Conv2d(width, 4, 1)

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        high = self.first(field)
        middle = self.second(high)
        low = self.bottom(self.third(middle))
        middle = self.fourth(torch.cat([middle, self.up(low)], 1))
        result: torch.Tensor = self.last(self.fifth(torch.cat([high, self.up(middle)], 1)))
        return result


def step(model: torch.nn.Module, field: torch.Tensor) -> None:
    """Train once, on one rank or on all."""
    model(field).square().sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=1e-9)
            parameter.grad = None


def measure_unet(size: int, width: int, rounds: int) -> None:
    """Print how long a step takes, on the ranks of a job."""
    torch.set_num_threads(1)
    manager = DistributedManager.initialize()
    field = torch.randn(1, 4, size, size)
    block = field.split(distman.split_sizes(size, manager.world_size), -2)[manager.rank].contiguous()
    parallel = manager.wrap_ddp(decompose(UNet(width), {-2: "world"}))
    whole = UNet(width)
    ways = {
        "one process": lambda: step(whole, field) if manager.is_main else None,
        "decomposed": lambda: step(parallel, block),
        "apart": lambda: step(whole, block),
    }
    for unit, clock in (("ms", time.perf_counter), ("ms of the CPU", time.process_time)):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, way in ways.items():
                dist.barrier()
                start = clock()
                way()
                times[name].append(1000 * max(all_gather_objects(clock() - start)))
        if manager.is_main:
            shown = {name: statistics.median(one[1:]) for name, one in times.items()}
            text = ", ".join(f"{name} {one:.0f} ({one / shown['one process']:.2f})" for name, one in shown.items())
            print(f"{manager.world_size} ranks, {width} channels, {size} x {size}: {text} {unit}", flush=True)


def main() -> None:
    """Measure on several numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the field, of 8 channels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=16, help="channels of the U-Net at full resolution")
    parser.add_argument("--unet", action="store_true", help="measure a step of a U-Net instead")
    arguments = parser.parse_args()
    for num_ranks in arguments.ranks:
        if arguments.unet:
            distman.run(measure_unet, arguments.size, arguments.width, arguments.rounds, n=num_ranks)
            continue
        for halo in (1, 3):
            distman.run(measure, arguments.size, halo, arguments.rounds, n=num_ranks)


if __name__ == "__main__":
    main()
