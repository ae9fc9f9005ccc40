"""What the start of a job costs, against torch alone, side by side in one run.

    python docs/benchmarks/start.py            # everything, two to three minutes on two cores
    python docs/benchmarks/start.py import membership

Every figure is a median; ratios are taken within one run, since machines are noisy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import gc
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

IMPORT_ROUNDS = 9
START_ROUNDS = 40
RANKS_ROUNDS = 30
RANK_PROCESSES = 32  # for simulated ranks: threads of one process would wait for each other's turn
FILES_PER_RANK = 8  # connections of a simulated rank to the store, with room to spare


def measure_import() -> None:
    """Compare ``import torch`` with ``import torch`` and distman, in fresh interpreters, in turn."""
    programs = {
        "import torch": "import torch",
        "import torch, distman": "import torch, distman",
        "import torch, distman.manager": "import torch, distman.manager",
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(IMPORT_ROUNDS):
        for name, program in programs.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            seconds[name].append(time.perf_counter() - started)
    bare = seconds["import torch"]
    for name, values in seconds.items():
        ratio = statistics.median(value / reference for value, reference in zip(values, bare, strict=True))
        print(f"{name:<40} {statistics.median(values) * 1e3:8.0f} ms   {ratio:.3f}")


def measure_start() -> None:
    """Compare ``initialize()`` with ``init_process_group`` under torchrun, with 2 and 8 ranks.

    Its lower bound is an interpreter that does nothing: the job's store is a process of its own.
    """
    seconds = []
    for _ in range(START_ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        seconds.append(time.perf_counter() - started)
    print(f"{'an interpreter that does nothing':<40} {statistics.median(seconds) * 1e3:8.1f} ms", flush=True)
    for num_ranks in (2, 8):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--master-port=29500",
            f"--nproc_per_node={num_ranks}",
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, __file__, "start_on_this_rank"], check=True, env=environ)


def measure_start_on_this_rank() -> None:
    """Time both on this rank, in turn, from the same moment on all ranks; rank 0 prints."""
    import torch.distributed as dist

    from distman import DistributedManager

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore(address, port, size, is_master=False, timeout=limit)

    def start_bare(number: int) -> None:
        mine = dist.TCPStore(address, port, size, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=dist.PrefixStore(f"bare{number}", mine), rank=rank, world_size=size)

    def start_distman(_: int) -> None:
        DistributedManager.initialize()

    def timed(name: str, start: Callable[[int], None], number: int) -> float:
        meet(store, f"{name}{number}", size)
        started = time.perf_counter()
        start(number)
        seconds = time.perf_counter() - started
        meet(store, f"{name}{number} is up", size)
        if DistributedManager.is_initialized():
            DistributedManager.cleanup()
        else:
            dist.destroy_process_group()
        return seconds

    pairs = [(timed("bare", start_bare, i), timed("distman", start_distman, i)) for i in range(START_ROUNDS)]
    bare, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(mine / reference for reference, mine in pairs)
    if rank == 0:
        print(f"{f'init_process_group, {size} ranks':<40} {bare * 1e3:8.1f} ms   1.000")
        print(f"{f'initialize(), {size} ranks':<40} {ours * 1e3:8.1f} ms   {ratio:.3f}", flush=True)


def meet(store: object, name: str, size: int) -> None:
    """Wait until all ranks are here."""
    store.add(name, 1)  # type: ignore[attr-defined]
    while store.add(name, 0) < size:  # type: ignore[attr-defined]
        time.sleep(0.0005)


def measure_membership(num_ranks: int = 1024) -> None:
    """Time the membership check of simulated ranks, threads of some processes, with a real store on TCP."""
    from distman._job.meeting.address import derive_ports
    from distman._job.meeting.join import allow_open_files
    from distman._job.meeting.membership import establish_membership
    from distman._job.meeting.peers import JoinRecord, Peer
    from distman._job.meeting.places import AtPorts

    allow_open_files(FILES_PER_RANK * num_ranks)
    name = f"benchmark-{os.getpid()}"
    point = AtPorts(name, ("127.0.0.1",), derive_ports(name), "the benchmark", is_host=False)

    def join_record(rank: int) -> JoinRecord:
        place = {"local_rank": rank % 8, "local_world_size": 8, "node_rank": rank // 8, "num_nodes": num_ranks // 8}
        return JoinRecord(
            rank=rank,
            world_size=num_ranks,
            host=f"n{rank // 8}",
            boot_id="",
            pid=rank,
            launcher="slurm",
            backend="cuda",
            device_type="cuda",
            device=None,
            visible=tuple(f"GPU-{rank // 8}-{index}" for index in range(8)),
            has_own_devices=False,
            is_sharing_allowed=False,
            torch="2.13.0",
            distman="0.1.0",
            started=0.0,
            command="train.py",
            **place,
        )

    def attend(rank: int, here: threading.Barrier) -> tuple[Peer, ...]:
        job_store = point.open(0, 60) if rank == 0 else point.find(rank, 60)
        stores.append(job_store)
        here.wait()
        here.wait()
        return establish_membership(job_store, join_record(rank), timeout=60, source="the benchmark", expected={})

    def attend_here(ranks: range) -> None:
        """Let some of the ranks take part, and leave without a word: they have nothing to say to each other."""
        here = threading.Barrier(len(ranks) + 1)
        with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
            futures = [pool.submit(attend, rank, here) for rank in ranks]
            here.wait()
            everyone.wait()
            here.wait()
            results = [future.result() for future in futures]
        if any(result != results[0] for result in results) or len(results[0]) != num_ranks:
            raise RuntimeError("the ranks did not learn the same")
        everyone.wait()
        os._exit(0)

    stores: list[object] = []
    processes = multiprocessing.get_context("fork")
    everyone = processes.Barrier(RANK_PROCESSES + 1)
    share = num_ranks // RANK_PROCESSES
    gc.freeze()  # else each process collects what it shares with the others, and thereby copies it
    started = time.perf_counter()
    for index in range(RANK_PROCESSES):
        processes.Process(target=attend_here, args=(range(index * share, (index + 1) * share),)).start()
    everyone.wait()
    connected = time.perf_counter()
    everyone.wait()
    row(f"a store for {num_ranks} simulated ranks", connected - started)
    row(f"membership of {num_ranks} simulated ranks", time.perf_counter() - connected)


def row(what: str, seconds: float) -> None:
    print(f"{what:<45} {seconds * 1e3:8.0f} ms", flush=True)


def measure_ranks() -> None:
    """Time a warm test of two ranks, as pytest reports it."""
    test = "from distman.testing import ranks\nimport pytest\n\n" + (
        f"@pytest.mark.parametrize('round', range({RANKS_ROUNDS}))\n@ranks(2)\ndef test_nothing(round):\n    pass\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_ranks.py").write_text(test)
        options = ["-q", "--durations=0", "-vv", "-p", "no:cacheprovider", "--rootdir", folder]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, folder], capture_output=True, text=True, check=True
        )
    seconds: dict[str, float] = {}
    for line in done.stdout.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[1] in ("setup", "call", "teardown") and "test_nothing" in line:
            test_id = line.split("::")[-1]
            seconds[test_id] = seconds.get(test_id, 0.0) + float(fields[0].removesuffix("s"))
    print(f"{'a warm @ranks(2) test':<40} {statistics.median(seconds.values()) * 1e3:8.0f} ms")


BENCHMARKS: dict[str, Callable[[], None]] = {
    "import": measure_import,
    "start": measure_start,
    "membership": measure_membership,
    "ranks": measure_ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*BENCHMARKS, "start_on_this_rank"]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help=", ".join(BENCHMARKS))
    chosen = parser.parse_args().names
    if chosen == ["start_on_this_rank"]:
        measure_start_on_this_rank()
    elif len(chosen) == 1:
        BENCHMARKS[chosen[0]]()
    else:
        for name in chosen or BENCHMARKS:
            subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
