"""Trainings of which a rank becomes slow, or none: is it named in time, and is no other?

Run with ``python -m tests.slow_trials --slow 20 --balanced 20 --seed 1``. A slow run is right if the slow rank and its
phase are named, and nothing else, within 30 steps; a balanced run, if nobody is named.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.processes import launch_environment

JOB = Path(__file__).with_name("slow_job.py")
PHASES = ("loading", "forward", "backward")
LOOPS = ("stepper", "handler", "ddp")
IN_TIME = 30  # steps
SINCE = 20  # the step from which a rank is slow
SECONDS_OF_A_UNIT = 75e-6  # of work, on a core of its own
LIMIT = 1800.0  # seconds for a run


def run(*options: object, ranks: int) -> tuple[list[list[object]], float]:
    """Return what was found in a run, and its seconds."""
    command = [sys.executable, "-m", "distman", "run", "-n", ranks, JOB, *options]
    env = launch_environment({"PYTHONPATH": str(JOB.parents[1]), "OMP_NUM_THREADS": "1"})
    began = time.monotonic()
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, env=env, timeout=LIMIT)
    (line,) = [line for line in done.stdout.splitlines() if "[" in line]
    return json.loads(line[line.index("[") :]), time.monotonic() - began


def slow_run(chance: random.Random, ranks: int, work: list[object]) -> bool:
    rank, phase = chance.randrange(ranks), chance.choice(PHASES)
    loop = chance.choice(LOOPS if phase == "loading" else LOOPS[:2])  # the last one knows no other phase
    options = ["--rank", rank, "--phase", phase, "--loop", loop, "--since", SINCE, *work]
    found, seconds = run(*options, "--steps", SINCE + 2 * IN_TIME, ranks=ranks)
    is_right = bool(found) and all(one[1:3] == [rank, phase] and one[0] <= SINCE + IN_TIME for one in found)
    print(
        f"TRIAL slow     {phase:8} {loop:8} {seconds:6.1f} s  {'right' if is_right else 'WRONG'}  {found}", flush=True
    )
    return is_right


def balanced_run(chance: random.Random, ranks: int, work: list[object], steps: int) -> bool:
    loop = chance.choice(LOOPS)
    found, seconds = run("--loop", loop, *work, "--steps", steps, ranks=ranks)
    print(f"TRIAL balanced          {loop:8} {seconds:6.1f} s  {'WRONG' if found else 'right'}  {found}", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--balanced", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000, help="of a balanced run")
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="of each phase of slow runs; a tenth in balanced ones"
    )
    parser.add_argument("--busy", action="store_true", help="compute for about that time instead of sleeping")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    long, short = (
        ["--units", round(seconds / SECONDS_OF_A_UNIT)] if given.busy else ["--seconds", seconds]
        for seconds in (given.seconds, given.seconds / 10)
    )
    slow = [slow_run(chance, given.ranks, long) for _ in range(given.slow)]
    balanced = [balanced_run(chance, given.ranks, short, given.steps) for _ in range(given.balanced)]
    print(f"TRIALS slow: {sum(slow)} of {len(slow)} right; balanced: {sum(balanced)} of {len(balanced)} right")
    return 0 if all([*slow, *balanced]) else 1


if __name__ == "__main__":
    sys.exit(main())
