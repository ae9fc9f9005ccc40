"""Compute one point of a parameter study in each task of a Slurm array, and put the points together at the end.

    sbatch --array=0-7 --wrap "srun python docs/examples/array_study.py --folder study"
    python docs/examples/array_study.py --folder study --task 3
    distman run -n 2 docs/examples/array_study.py --folder study --task 3
    python docs/examples/array_study.py --folder study --table

Random walkers on a line are caught by a trap with some probability; the study asks how many are left. Each task is a
job of its own, of as many ranks as it was given; its ranks share the walkers. A task that has its result does nothing,
so the whole array can be submitted again after a failure, and only what is missing is computed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

import torch

from distman import DistributedManager, on_rank, split_sizes
from distman.collectives import fused_all_reduce

POINTS = list(itertools.product([1, 2, 4, 8], [0.3, 1.0]))  # distance of the trap, probability to be caught
NUM_GROUPS = 16  # of walkers: each has a seed, so that the result does not depend on which rank computes which
NUM_STEPS = 64


def survivors(distance: int, catches: float, num_walkers: int, seed: int) -> torch.Tensor:
    """Return how many of some walkers are left."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.zeros(num_walkers, dtype=torch.int64)
    is_left = torch.ones(num_walkers, dtype=torch.bool)
    for _ in range(NUM_STEPS):
        places += 2 * torch.randint(2, (num_walkers,), generator=generator) - 1
        is_left &= (places != distance) | (torch.rand(num_walkers, generator=generator) >= catches)
    return is_left.sum()


@on_rank(0)
def write(file: Path, result: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")  # a task may be killed: what has its name is whole
    unfinished.write_text(json.dumps(result))
    unfinished.rename(file)


def print_table(folder: Path) -> None:
    files = sorted(folder.glob("point-*.json"))
    for file in files:
        result = json.loads(file.read_text())
        print(f"distance {result['distance']}  caught with {result['catches']:.1f}  left {result['left']:.4f}")
    missing = [str(i) for i in range(len(POINTS)) if not (folder / f"point-{i}.json").exists()]
    print(f"missing: {','.join(missing)}" if missing else "nothing is missing")  # as --array takes them


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask how many random walkers a trap leaves.")
    parser.add_argument("--folder", type=Path, default=Path("study"), help="a file for each point")
    parser.add_argument("--task", type=int, default=os.environ.get("SLURM_ARRAY_TASK_ID"), help="point to compute")
    parser.add_argument("--walkers", type=int, default=20_000)
    parser.add_argument("--table", action="store_true", help="print what is there, and what is missing")
    options = parser.parse_args()
    if options.table:
        return print_table(options.folder)
    if options.task is None or not 0 <= options.task < len(POINTS):
        parser.error(f"--task must be 0 to {len(POINTS) - 1}, or this a task of sbatch --array=0-{len(POINTS) - 1}")

    manager = DistributedManager.initialize()
    file = options.folder / f"point-{options.task}.json"
    if on_rank(0, broadcast=True)(file.exists)():  # one rank looks: the others may see the folder a moment later
        return None
    distance, catches = POINTS[options.task]
    sizes = split_sizes(options.walkers, NUM_GROUPS)
    mine = range(manager.rank, NUM_GROUPS, manager.world_size)
    left = sum((survivors(distance, catches, sizes[group], seed=group) for group in mine), torch.tensor(0))
    total = fused_all_reduce(left.to(manager.device)).item()
    write(file, {"distance": distance, "catches": catches, "left": total / options.walkers})
    return None


if __name__ == "__main__":
    main()
