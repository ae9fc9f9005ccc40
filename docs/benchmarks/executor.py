"""What a call on every device costs, beside the pools that torch and Python bring along.

Each benchmark is a process of its own; without a name all run.

    python docs/benchmarks/executor.py [cold_start] [round_trip] [tensors] [peers]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.multiprocessing

from distman.executor import ParallelExecutor

DEVICES = ["cpu", "cpu"]
ROUNDS = 1000
TENSOR_ROUNDS = 30
START_ROUNDS = 7
MEGABYTES = 64
KEPT: list[torch.Tensor] = []


def nothing(*_: object) -> None:
    """Do nothing."""


def kept_tensor(*_: object) -> torch.Tensor:
    """Return 64 MB that have been there since the first call."""
    if not hasattr(torch, "_benchmark"):
        torch._benchmark = torch.ones(MEGABYTES << 18)  # type: ignore[attr-defined]
    return torch._benchmark  # type: ignore[attr-defined, no-any-return]


def new_tensor(*_: object) -> torch.Tensor:
    """Return 64 MB that were made just now."""
    return torch.ones(MEGABYTES << 18)


def seconds_of(call: Callable[[], object], rounds: int) -> list[float]:
    """Return how long each call took; the last result is there during the next call, as in a loop."""
    result, seconds = call(), []
    for _ in range(rounds):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    del result
    return seconds


def start_once() -> float:
    started = time.perf_counter()
    with ParallelExecutor(devices=DEVICES) as executor:
        executor.run(nothing)
        return time.perf_counter() - started


def measure_cold_start() -> None:
    """Time the first call of two workers: after import torch, after OpenMP, and in a program with threads."""
    row("cold start, torch imported", [start_once() for _ in range(START_ROUNDS)])

    def start_after_openmp() -> float:
        torch.ones(10**7).sum()
        return start_once()

    row("cold start, OpenMP threads in use", [start_after_openmp() for _ in range(START_ROUNDS)])
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    row("cold start, a program with threads", [start_once() for _ in range(3)])
    stop.set()


def measure_round_trip() -> None:
    """Time a call of nothing."""
    with ParallelExecutor(devices=DEVICES) as executor:
        row("run() of nothing on 2 workers", seconds_of(lambda: executor.run(nothing), ROUNDS))
        row("submit() of nothing", seconds_of(lambda: executor.submit(nothing).result(), ROUNDS))
    with ParallelExecutor(devices=DEVICES[:1]) as executor:
        row("run() of nothing on 1 worker", seconds_of(lambda: executor.run(nothing), ROUNDS))


def measure_tensors() -> None:
    """Time the way back of 64 MB from each worker, without and with a look at all of it."""
    source, target = torch.ones(MEGABYTES << 18), torch.ones(MEGABYTES << 18)
    row("copy of 64 MB to memory in use, 1 process", seconds_of(lambda: target.copy_(source), TENSOR_ROUNDS))
    with ParallelExecutor(devices=DEVICES) as executor:
        row("2 x 64 MB back", seconds_of(lambda: executor.run(kept_tensor), TENSOR_ROUNDS))

        def run_and_read() -> list[torch.Tensor]:
            results = executor.run(kept_tensor)
            KEPT[:] = [result.sum() for result in results]
            return results

        row("2 x 64 MB back, and read", seconds_of(run_and_read, TENSOR_ROUNDS))
        results: list[list[torch.Tensor]] = []
        row("2 x 64 MB back, all kept", seconds_of(lambda: results.append(executor.run(kept_tensor)), 6))


def measure_peers() -> None:
    """Time torch's pool and Python's; torch's moves a tensor to shared memory for good, so that only new ones count."""
    with ParallelExecutor(devices=DEVICES) as executor:
        row("2 x 64 MB back, made anew", seconds_of(lambda: executor.run(new_tensor), TENSOR_ROUNDS))
    context = torch.multiprocessing.get_context("forkserver")
    with context.Pool(2) as pool:
        row("torch Pool: nothing", seconds_of(lambda: pool.map(nothing, DEVICES), ROUNDS))
        row("torch Pool: 2 x 64 MB back, made anew", seconds_of(lambda: pool.map(new_tensor, DEVICES), TENSOR_ROUNDS))
    with ProcessPoolExecutor(2, mp_context=context) as python_pool:
        row("ProcessPoolExecutor: nothing", seconds_of(lambda: list(python_pool.map(nothing, DEVICES)), ROUNDS))


def row(what: str, seconds: list[float]) -> None:
    median, least = statistics.median(seconds), min(seconds)
    print(f"{what:<45} {median * 1e3:9.2f} ms   (least {least * 1e3:.2f})", flush=True)


BENCHMARKS: dict[str, Callable[[], None]] = {
    "cold_start": measure_cold_start,
    "round_trip": measure_round_trip,
    "tensors": measure_tensors,
    "peers": measure_peers,
}


def main() -> None:
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
