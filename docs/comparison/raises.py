"""Rank 1 raises while rank 0 waits for it: say what rank 0 hears, and when.

Start with ``torchrun --master-port=29500 --nproc-per-node=2 raises.py PEER``, or with ``--bare`` as two processes that
have only the variables of ``env://`` and no launcher that watches them.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def connect(peer: str) -> tuple[int, Callable[[], object]]:
    """Return the rank and a barrier."""
    if peer == "torch":
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.barrier
    if peer == "accelerate":
        from accelerate import PartialState

        state = PartialState(cpu=True)
        return state.process_index, state.wait_for_everyone
    if peer == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        return fabric.global_rank, fabric.barrier
    if peer == "physicsnemo":
        from physicsnemo.distributed import DistributedManager

        DistributedManager.initialize()
        return DistributedManager().rank, dist.barrier
    from distman import DistributedManager

    manager = DistributedManager.initialize()
    return manager.rank, manager.barrier


def work(peer: str) -> None:
    rank, barrier = connect(peer)
    barrier()
    if rank == 1:
        raise ValueError("sample 17 has no label")
    start = time.monotonic()
    try:
        barrier()
    except BaseException as error:
        print(f"rank 0 after {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}", flush=True)
        raise


def start_bare() -> None:
    """Run this program twice, without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    common |= {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    command = [sys.executable, *(word for word in sys.argv if word != "--bare")]
    ranks = [subprocess.Popen(command, env={**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    print("exit codes", [rank.wait() for rank in ranks])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["torch", "accelerate", "fabric", "physicsnemo", "distman"])
    parser.add_argument("--bare", action="store_true", help="start both ranks here, as two processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.bare:
        start_bare()
    else:
        work(options.peer)
