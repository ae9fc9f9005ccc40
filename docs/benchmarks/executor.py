"""What a call on two workers costs, beside the pools of torch, Python and loky.

    python docs/benchmarks/executor.py         # everything, about two minutes on two cores
    python docs/benchmarks/executor.py cold_start round_trip tensors

Every figure is a median; the competitors take turns, and ratios are taken within one run. loky is compared where it is
installed: pip install '.[bench]'.
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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.multiprocessing

from distman import ParallelExecutor

DEVICES = ["cpu", "cpu"]
STARTS = 7
ROUNDS = 3
CALLS = 500
TENSOR_CALLS = 15
MEGABYTES = 64

# Calls a function once on each of two workers.
Pool = Callable[[Callable[..., object]], object]


def nothing(*_: object) -> None:
    """Do nothing."""


def kept_tensor(*_: object) -> torch.Tensor:
    """Return 64 MB that have been there since the first call."""
    if not hasattr(torch, "_benchmark"):  # a global variable of this file does not travel with the function
        torch._benchmark = torch.ones(MEGABYTES << 18)  # type: ignore[attr-defined]
    return torch._benchmark  # type: ignore[attr-defined, no-any-return]


def new_tensor(*_: object) -> torch.Tensor:
    """Return 64 MB that were made just now."""
    return torch.ones(MEGABYTES << 18)


@contextlib.contextmanager
def distman_executor() -> Iterator[Pool]:
    """Open the executor that is measured."""
    with ParallelExecutor(devices=DEVICES) as executor:
        yield executor.run


@contextlib.contextmanager
def torch_pool() -> Iterator[Pool]:
    """Open a pool that sends tensors as shared memory."""
    with torch.multiprocessing.get_context("forkserver").Pool(2) as pool:
        yield lambda function: pool.map(function, DEVICES)


@contextlib.contextmanager
def python_pool() -> Iterator[Pool]:
    """Open a pool that pickles tensors through a pipe."""
    context = torch.multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        yield lambda function: list(pool.map(function, DEVICES))


@contextlib.contextmanager
def loky_pool() -> Iterator[Pool]:
    """Open loky's pool."""
    with importlib.import_module("loky").ProcessPoolExecutor(2) as pool:
        yield lambda function: list(pool.map(function, DEVICES))


POOLS: dict[str, Callable[[], contextlib.AbstractContextManager[Pool]]] = {
    "distman": distman_executor,
    "torch Pool": torch_pool,
    "ProcessPoolExecutor": python_pool,
}
if importlib.util.find_spec("loky"):
    POOLS["loky"] = loky_pool


def seconds_of(call: Callable[[], object], calls: int) -> list[float]:
    """Return how long each call took after the first; a result is there during the next call, as in a loop."""
    result, seconds = call(), []
    for _ in range(calls):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    del result
    return seconds


def compare(what: str, function: Callable[..., object], calls: int) -> None:
    """Time a function in every pool: the pools take turns, and only one is open at a time."""
    medians: dict[str, list[float]] = {name: [] for name in POOLS}
    for _ in range(ROUNDS):
        for name, opened in POOLS.items():
            with opened() as pool:
                medians[name].append(statistics.median(seconds_of(lambda pool=pool: pool(function), calls)))
    for name, values in medians.items():
        ratio = statistics.median(value / own for value, own in zip(values, medians["distman"], strict=True))
        show(f"{what}: {name}", values, f"{ratio:6.1f}")


def show(name: str, seconds: Sequence[float], ratio: str = "") -> None:
    """Print a line of the table."""
    print(f"{name:<50} {statistics.median(seconds) * 1e3:9.2f} ms {ratio}", flush=True)


def start_with(opened: Callable[[], contextlib.AbstractContextManager[Pool]]) -> float:
    """Return how long it takes to start two workers and call them once."""
    started = time.perf_counter()
    with opened() as pool:
        pool(nothing)
        return time.perf_counter() - started


def measure_cold_start() -> None:
    """Time two workers' start and first call."""
    for name, opened in POOLS.items():
        show(f"start: {name}", [start_with(opened) for _ in range(STARTS)])


def measure_round_trip() -> None:
    """Time a call of nothing."""
    compare("nothing", nothing, CALLS)
    with ParallelExecutor(devices=DEVICES) as executor:
        show("nothing: distman submit()", seconds_of(lambda: executor.submit(nothing).result(), CALLS))


def measure_tensors() -> None:
    """Time the way back of 64 MB from each worker; torch's pool moves a tensor for good: only new ones are fair."""
    source, target = torch.ones(MEGABYTES << 18), torch.ones(MEGABYTES << 18)
    show("64 MB copied to memory in use, 1 process", seconds_of(lambda: target.copy_(source), TENSOR_CALLS))
    with ParallelExecutor(devices=DEVICES) as executor:
        show("2 x 64 MB: distman", seconds_of(lambda: executor.run(kept_tensor), TENSOR_CALLS))
    compare("2 x 64 MB, made anew", new_tensor, TENSOR_CALLS)


BENCHMARKS: dict[str, Callable[[], None]] = {
    "cold_start": measure_cold_start,
    "round_trip": measure_round_trip,
    "tensors": measure_tensors,
}


def main() -> None:
    """Run the chosen benchmarks, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    chosen = parser.parse_args().names
    if len(chosen) == 1:
        BENCHMARKS[chosen[0]]()
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}", flush=True)
    for name in chosen or BENCHMARKS:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
