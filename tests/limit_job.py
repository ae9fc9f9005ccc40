"""The job of ``limit_trials``: it computes until its time is almost up, saving now and then and at the end."""

import json
import sys
import time
from pathlib import Path

import torch

from distman import DistributedManager
from distman.checkpoint import CheckpointFolder

run, seconds_of_a_step, megabytes, every = Path(sys.argv[1]), *map(float, sys.argv[2:])
manager = DistributedManager.initialize()
folder = CheckpointFolder(run / "checkpoints", background=False)
weights = torch.zeros(int(megabytes * 2**18))
step = 0
while not manager.should_stop(step):
    step += 1
    time.sleep(seconds_of_a_step * (1 + manager.rank))  # unlike paces
    manager.barrier()
    if step % int(every) == 0:
        folder.save({"step": step, "weights": weights}, step)
folder.save({"step": step, "weights": weights}, step)
if manager.is_main:
    (run / "end").write_text(json.dumps({"step": step, "left": manager.time_left()}))
