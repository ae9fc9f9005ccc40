"""Rank 0 gives up on rank 1, which comes late, and tries again; rank 1 tries until rank 0 is there."""

import os
import sys
import time

from distman import DistributedManager, RendezvousError

limit = 1.0 if os.environ["RANK"] == "0" else 20.0
gave_up = 0
if os.environ["RANK"] == "1":
    while not os.path.exists(sys.argv[1]):  # noqa: PTH110 - rank 0 makes it when it has given up
        time.sleep(0.05)
while not DistributedManager.is_initialized():
    try:
        DistributedManager.initialize(rendezvous_timeout=limit)
    except RendezvousError:
        gave_up += 1
        limit = 20.0
        with open(sys.argv[1], "w"):  # noqa: PTH123
            pass
sys.stdout.write(f"{DistributedManager().rank} of {DistributedManager().world_size} after {gave_up}\n")
