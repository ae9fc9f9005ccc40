"""Start rank 0 of 2 alone: print what it is told after five seconds."""

import argparse
import os
import sys
import time
from datetime import timedelta

LIMIT = 5


def connect(peer: str) -> None:
    if peer == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    elif peer == "accelerate":
        from accelerate import PartialState

        PartialState(cpu=True, timeout=timedelta(seconds=LIMIT))
    elif peer == "fabric":
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy

        strategy = DDPStrategy(timeout=timedelta(seconds=LIMIT))
        Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
    elif peer == "physicsnemo":
        from physicsnemo.distributed import DistributedManager

        DistributedManager.initialize()  # has no option for the time: torch's default counts
    else:
        from distman import DistributedManager

        DistributedManager.initialize(rendezvous_timeout=LIMIT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["torch", "accelerate", "fabric", "physicsnemo", "distman"])
    peer = parser.parse_args().peer
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2", "RANK": "0"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    start = time.monotonic()
    try:
        connect(peer)
    except Exception as error:  # noqa: BLE001 - whatever the peer raises is the answer
        print(f"{peer} after {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}")
        sys.exit(1)
