"""Jobs of one minute on a real Slurm cluster, under srun and torchrun: do they end, saved, before their time is up?

Run with ``python -m tests.limit_trials --jobs 20 --seed 1``. The time of a step, the size of the state and how often
it is saved are drawn at random. A job is right if Slurm calls it completed and its last step is in its last checkpoint.
"""

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from tests.launch.slurm import SlurmCluster

JOB = Path(__file__).with_name("limit_job.py")
NUM_NODES = 4  # a job on each
TIMEOUT = 180.0  # seconds


def try_job(cluster: SlurmCluster, number: int, seed: int) -> bool:
    chance = random.Random(f"{seed} {number}")
    drawn = [chance.choice([0.02, 0.1, 0.5, 2.0]), chance.choice([1, 20, 200]), chance.choice([5, 50, 10**6])]
    launcher = ["srun --ntasks=2", "torchrun --standalone --nproc-per-node=2"][number % 2]
    python = sys.executable if "srun" in launcher else ""
    with tempfile.TemporaryDirectory(prefix="distman-limit-") as folder:
        run = Path(folder)
        words = " ".join(map(str, [launcher, python, JOB, run, *drawn]))
        env = {"PYTHONPATH": str(JOB.parents[1])}
        done = cluster.sbatch(
            f"#!/bin/bash\n{words}\n", "--nodes=1", "--ntasks=2", "--time=1", env=env, timeout=TIMEOUT
        )
        end = json.loads((run / "end").read_text()) if (run / "end").exists() else {}
        latest = run / "checkpoints" / "latest.pt"
        is_saved = latest.exists() and torch.load(latest, mmap=True)["step"] == end.get("step")
    is_right = done.returncode == 0 and is_saved and end["left"] > 0
    state = f"step of {drawn[0]} s, {drawn[1]} MB, saved every {drawn[2]}"
    print(
        f"TRIAL {launcher.split()[0]:8} {state:45} {done.seconds:5.1f} s  {'right' if is_right else 'WRONG'}  {end}",
        flush=True,
    )
    if not is_right:
        print(done, flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with SlurmCluster(NUM_NODES) as cluster, ThreadPoolExecutor(NUM_NODES) as pool:
        right = list(pool.map(partial(try_job, cluster, seed=given.seed), range(given.jobs)))
    print(f"TRIALS {sum(right)} of {len(right)} right")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
