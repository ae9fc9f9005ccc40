"""What the start and the end of a job cost with hundreds of real ranks on one machine, beside torch alone.

    python docs/benchmarks/scale.py            # 16, 48, 96 and 192 ranks
    python docs/benchmarks/scale.py 96 --rounds 3

All ranks are forked from one process that has imported torch, and compute with one thread. torch alone and distman
take turns, with gloo connecting all ranks at once, as it does by itself, and on demand (TORCH_GLOO_LAZY_INIT). Seconds
are the last rank's, from the moment when all may begin. Memory is what a rank has for itself. Calls are those into the
job's store, and bytes what they carry there and back, without headers, until the first all_reduce is done; of each the
mean over all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import os
import select
import signal
import socket
import statistics
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from distman import DistributedManager
from distman._store.connection import Connection

WAYS = {"torch": "", "torch, on demand": "1", "distman": "", "distman, on demand": "1"}
SIZES = (16, 48, 96, 192)
LIMIT = 100.0  # seconds that a job may take; torch alone needs the most, where the DNS is slow
FORK_SECONDS = 0.01  # for each rank, until all may begin
SETTLE_SECONDS = 0.5  # for the machine to become quiet again
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, ``linux/prctl.h``
MOST_BYTES = 4096  # of a report: so much is written to a pipe in one piece
MANY_BYTES = 1 << 20  # read at once
MIB = 1 << 20

Report = dict[str, float]


class Calls:
    """Counts what this process asks of the job's store, and what that carries; nothing is changed on the way."""

    def __init__(self) -> None:
        self.number = self.sent = self.received = 0
        make_call = Connection.call

        def counted_call(connection: Connection, operation: int, *fields: bytes) -> bytes:
            self.number += 1
            self.sent += sum(map(len, fields))
            reply = make_call(connection, operation, *fields)
            self.received += len(reply)
            return reply

        Connection.call = counted_call  # type: ignore[method-assign]  # to count what goes over it


def start(way: str) -> None:
    if way.startswith("distman"):
        DistributedManager.initialize(rendezvous_timeout=LIMIT)
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT))


def end(way: str) -> None:
    if way.startswith("distman"):
        DistributedManager.cleanup()
    else:
        dist.destroy_process_group()


def attend(way: str, rank: int, size: int, port: int, begin: float) -> Report:
    """Take part in a job, and return what it cost this rank."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    if WAYS[way]:
        os.environ["TORCH_GLOO_LAZY_INIT"] = WAYS[way]
    calls = Calls()
    time.sleep(max(0.0, begin - time.monotonic()))
    start(way)
    started = time.monotonic()
    total = torch.ones(1)
    dist.all_reduce(total)
    if total.item() != size:
        raise RuntimeError(f"the sum must be {size}, got {total.item()}")
    reduced = time.monotonic()
    costs = {"files": num_files("self"), "MiB": private_bytes() / MIB}
    costs |= {"calls": calls.number, "sent": calls.sent, "received": calls.received}
    if rank == 0 and way.startswith("distman"):
        costs["files of the store"] = num_files(store_pid())
    dist.all_reduce(total)
    dist.all_reduce(total)  # nobody ends while another one still counts
    ending = time.monotonic()
    end(way)
    return {"start": started - begin, "all_reduce": reduced - started, "end": time.monotonic() - ending, **costs}


def store_pid() -> int:
    """Return the process that serves the store of this rank's job."""
    rendezvous = DistributedManager._shared_state["_state"].job.rendezvous
    return int(rendezvous.client.store_pid)


def num_files(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def run_job(way: str, size: int) -> list[Report]:
    """Return what each rank reports, in rank order; whatever happens, no rank is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    begin = time.monotonic() + SETTLE_SECONDS + FORK_SECONDS * size
    pids: list[int] = []
    try:
        pids.extend(fork_rank(way, rank, size, port, begin, writing) for rank in range(size))
        os.close(writing)
        return collect(reading, size, begin + LIMIT)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        os.close(reading)


def fork_rank(way: str, rank: int, size: int, port: int, begin: float, writing: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        report: dict[str, object] = {"rank": rank, **attend(way, rank, size, port, begin)}
    except BaseException:  # noqa: BLE001 - the parent raises it
        report = {"rank": rank, "error": traceback.format_exc()[-MOST_BYTES // 4 :]}
    os.write(writing, json.dumps(report).encode() + b"\n")
    os._exit(0)


def collect(reading: int, size: int, until: float) -> list[Report]:
    """Return the reports of all ranks, in rank order, or raise the first error among them."""
    text = b""
    reports: list[Report] = []
    while len(reports) < size:
        if not select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"{size - len(reports)} of {size} ranks did not report within {LIMIT:g} s")
        *lines, text = (text + os.read(reading, MANY_BYTES)).split(b"\n")
        reports += [json.loads(line) for line in lines]
        for report in reports:
            if "error" in report:
                raise RuntimeError(f"rank {report['rank']}: {report['error']}")
    return sorted(reports, key=lambda report: report["rank"])


def show(way: str, size: int, jobs: list[list[Report]]) -> None:
    """Print the medians over the rounds: of the last rank's seconds, and of what most ranks and rank 0 hold."""

    def last(name: str) -> float:
        return statistics.median(max(rank[name] for rank in job) for job in jobs)

    def of_rank(name: str) -> str:
        all_ranks = statistics.median(rank[name] for job in jobs for rank in job)
        return f"{all_ranks:8.1f} {statistics.median(job[0][name] for job in jobs):8.1f}"

    def mean(name: str) -> float:
        return statistics.fmean(rank[name] for job in jobs for rank in job)

    seconds = "".join(f"{last(name):9.2f}" for name in ("start", "all_reduce", "end"))
    store = statistics.median(job[0].get("files of the store", 0) for job in jobs)
    holds = f"{of_rank('files')}{store:7.0f}  {of_rank('MiB')}"
    calls = "".join(f"{mean(name):10.0f}" for name in ("calls", "sent", "received"))
    print(f"{size:5} {way:20}{seconds}  {holds}  {calls}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # else each rank collects what it shares with the others, and thereby copies it
    titles = ("start", "reduce", "end", "files", "rank 0", "store", "MiB", "rank 0", "calls", "sent", "received")
    widths = (29, 9, 9, 10, 9, 7, 10, 9, 12, 10, 10)
    print(f"ranks {''.join(f'{title:>{width}}' for title, width in zip(titles, widths, strict=True))}")
    for size in arguments.sizes:
        jobs: dict[str, list[list[Report]]] = {way: [] for way in arguments.ways}
        for _ in range(arguments.rounds):
            for way, done in jobs.items():
                done.append(run_job(way, size))
        for way, done in jobs.items():
            show(way, size, done)


if __name__ == "__main__":
    main()
