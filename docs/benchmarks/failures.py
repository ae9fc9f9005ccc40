"""What it costs that ranks keep an eye on each other, and how soon they know of a failure.

    python docs/benchmarks/failures.py            # everything, about two minutes on two cores
    python docs/benchmarks/failures.py on_rank watcher news

Every figure is a median; ratios are taken within one run, since machines are noisy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CALLS = 1_000
WARM_UPS = 50
STEPS = 1_500
ROUNDS = 5
FAILURES = 5


def measure_on_rank() -> None:
    """Compare ``on_rank(0)`` and barriers with torch's barrier, on 2 and 4 ranks."""
    for num_ranks in (2, 4):
        _torchrun(num_ranks, "on_rank_here")


def measure_watcher() -> None:
    """Compare a training step with and without the watcher, in turn, and count what its threads compute."""
    seconds: dict[str, list[float]] = {"1": [], "0": []}
    share = []
    for _ in range(ROUNDS):
        for watch, values in seconds.items():
            with tempfile.NamedTemporaryFile("r") as result:
                _torchrun(2, "steps_here", result.name, DISTMAN_WATCH=watch)
                step, of_processor = (float(word) for word in result.read().split())
            values.append(step)
            if watch == "1":
                share.append(of_processor)
    ratios = [on / off for on, off in zip(seconds["1"], seconds["0"], strict=True)]
    _show("training step without the watcher, 2 ranks", statistics.median(seconds["0"]) * 1e3, "ms")
    _show("with it, against that", statistics.median(ratios), f"(from {min(ratios):.3f} to {max(ratios):.3f})")
    _show("processor time of its threads", statistics.median(share) * 100, "% of one core")


def measure_news() -> None:
    """Take the time from an uncaught exception, and from SIGKILL, to the end of the last other rank."""
    for fault in ("raise", "kill"):
        seconds = []
        for _ in range(FAILURES):
            with tempfile.TemporaryDirectory() as folder:
                port = _free_port()
                ranks = [_start_rank(rank, port, "fail_here", fault, folder) for rank in range(4)]
                for rank in ranks:
                    rank.wait()
                seconds.append(time.time() - float((Path(folder) / "moment").read_text()))
        _show(f"{fault} on rank 1 of 4: the last rank has ended after", statistics.median(seconds), "s")


def measure_scale(seconds: float = 5.0) -> None:
    """Ask a store as often as the watchers of large jobs do, and take what its process computes."""
    for num_ranks, num_hosts in ((10_000, 10_000), (10_000, 1_250), (100_000, 12_500)):
        _measure_store(num_ranks, num_hosts, seconds)


def _measure_store(num_ranks: int, num_hosts: int, seconds: float) -> None:
    from distman._coordination import protocol
    from distman._coordination.monitor.context import interval
    from distman._coordination.monitor.peer_monitor import _INTERVALS_PER_BEAT, give_sign, read_sign
    from distman._job.meeting.places import AtPorts

    point = AtPorts(f"benchmark-{os.getpid()}", ("127.0.0.1",), (), "the benchmark", is_host=True)
    job_store = point.open(0, 60)
    store, server = job_store.store, job_store.store.client.store_pid
    looks, beats = num_hosts / interval(num_hosts), num_hosts / (_INTERVALS_PER_BEAT * interval(num_ranks))  # a second
    before, began = _seconds_of_process(server), time.perf_counter()
    due = 0.0
    for _ in range(int(seconds * looks)):
        store.add(protocol.NEWS, 0)
        due += beats / looks
        if due >= 1:  # one rank of a host sends a heartbeat to another host, and one reads that of another host
            due -= 1
            give_sign(store, 0)
            read_sign(store, 0)
    took, worked = time.perf_counter() - began, _seconds_of_process(server) - before
    job_store.close()
    print(f"{num_ranks} ranks on {num_hosts} hosts: {looks:.0f} looks a second, {beats:.0f} heartbeats")
    _show("processor time of the store for them", worked / seconds * 100, "% of one core")
    _show("seconds of them, asked one after another", took, f"s for {seconds:.0f} s of watching")


def measure_on_rank_here() -> None:
    import torch.distributed as dist

    from distman import DistributedManager, on_rank

    manager = DistributedManager.initialize()
    nothing = on_rank(0)(_nothing)
    with_barrier = on_rank(0, barrier=True)(_nothing)
    bare = _time(dist.barrier)
    _report(manager, "torch's barrier (gloo)", bare, bare)
    _report(manager, "on_rank(0)", _time(nothing), bare)
    _report(manager, "on_rank(0, barrier=True)", _time(with_barrier), bare)
    _report(manager, "manager.barrier()", _time(manager.barrier), bare)
    steps = iter(range(10**9))
    _report(manager, "should_stop(step)", _time(lambda: manager.should_stop(next(steps))), bare)


def measure_steps_here(result: str) -> None:
    import torch

    from distman import DistributedManager

    manager = DistributedManager.initialize()
    layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    model = manager.wrap_ddp(torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(128, 256)
    times = []
    began, worked = time.perf_counter(), _seconds_of_watching()
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    share = (_seconds_of_watching() - worked) / (time.perf_counter() - began)
    if manager.is_main:
        Path(result).write_text(f"{statistics.mean(times)} {share}")


def measure_fail_here(fault: str, folder: str) -> None:
    import signal

    from distman import DistributedManager

    manager = DistributedManager.initialize()
    manager.barrier()
    if manager.rank == 1:
        time.sleep(1)
        (Path(folder) / "moment").write_text(str(time.time()))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")
    while True:
        time.sleep(0.01)


def _seconds_of_watching() -> float:
    """Return the processor time that the watching threads of this process have used."""
    import threading

    seconds = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("distman-"):
            fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            seconds += int(fields[0]) / 1e9
    return seconds


def _seconds_of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _nothing() -> None:
    pass


def _time(call: Callable[[], object]) -> float:
    """Return the median of a call's seconds on this rank, with all ranks calling it again and again."""
    import torch.distributed as dist

    for _ in range(WARM_UPS):
        call()
    dist.barrier()
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _report(manager: object, name: str, seconds: float, bare: float) -> None:
    """Print the median on the last rank, which waits for rank 0."""
    if manager.rank == manager.world_size - 1:
        print(f"{name:<28} {manager.world_size} ranks {seconds * 1e6:8.1f} us   {seconds / bare:6.3f}")


def _show(name: str, value: float, unit: str) -> None:
    print(f"{name:<60} {value:8.3f} {unit}")


def _torchrun(num_ranks: int, *arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port=29500", f"--nproc_per_node={num_ranks}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    subprocess.run([*command, __file__, *arguments], check=True, env=environ)


def _start_rank(rank: int, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    values = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environ = {**os.environ, **{name: str(value) for name, value in values.items()}}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=environ, stderr=subprocess.DEVNULL)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


MEASUREMENTS = {
    "on_rank": measure_on_rank,
    "watcher": measure_watcher,
    "news": measure_news,
    "scale": measure_scale,
}
ON_ONE_RANK = {
    "on_rank_here": measure_on_rank_here,
    "steps_here": measure_steps_here,
    "fail_here": measure_fail_here,
}


def main() -> None:
    """Run the measurements that are named, all without a name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(MEASUREMENTS)}")
    names = parser.parse_args().names or list(MEASUREMENTS)
    if names[0] in ON_ONE_RANK:
        ON_ONE_RANK[names[0]](*names[1:])
        return
    for name in names:
        MEASUREMENTS[name]()


if __name__ == "__main__":
    main()
