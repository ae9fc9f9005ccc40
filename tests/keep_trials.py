"""Jobs under ``distman keep`` on a real Slurm cluster of 4 + 2 nodes, each hit twice by a fault drawn at random.

Run with ``python -m tests.keep_trials --jobs 50 --seed 1``. For each fault it prints whether the next try left out the
host that it should and no other, and the seconds from the fault to the first new step.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.launch.processes import launch_environment, poll
from tests.launch.slurm import BatchJob, SlurmCluster

JOB = Path(__file__).with_name("keep_job.py")
NUM_NODES, SPARE = 6, 2
FIRST_HOST = "n1"  # runs the batch script, and so `distman keep`
MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT = 120.0  # seconds for a job to come back
SILENCE = "8"  # seconds after which a rank is silent


@dataclass(frozen=True)
class Place:
    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class Scene:
    """The cluster, the folder of the run, and the rank that a fault hits."""

    cluster: SlurmCluster
    run: Path
    place: Place


@dataclass(frozen=True)
class Fault:
    strike: Callable[[Scene], None]
    mend: Callable[[Scene], None] = lambda _scene: None
    makes_bad: bool = True
    takes_host: bool = False  # the whole of it, so that `distman keep` must not be there


def kill(scene: Scene) -> None:
    os.kill(scene.place.pid, signal.SIGKILL)


def stop(scene: Scene) -> None:
    os.kill(scene.place.pid, signal.SIGSTOP)


def crash(scene: Scene) -> None:
    os.kill(scene.place.pid, signal.SIGSEGV)


def raise_error(scene: Scene) -> None:
    (scene.run / f"error-{scene.place.rank}").touch()


def run_out_of_memory(scene: Scene) -> None:
    """Let the kernel end the rank, since it has more memory than its control group may."""
    group = MEMORY / f"distman-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(8 << 20))
    (group / "cgroup.procs").write_text(str(scene.place.pid))
    (scene.run / f"hungry-{scene.place.rank}").touch()


def leave_group(_scene: Scene) -> None:
    (MEMORY / f"distman-{os.getpid()}").rmdir()


def lose_host(scene: Scene) -> None:
    """End all that runs on the host, Slurm's daemon too."""
    network = Path(f"/proc/{scene.place.pid}/ns/net").readlink()
    holder = scene.cluster.hosts.pid_of(scene.place.host)
    for process in scene.cluster.hosts.processes():
        with_same = Path(f"/proc/{process.pid}/ns/net")
        if process.pid != holder and with_same.exists() and with_same.readlink() == network:
            process.send(signal.SIGKILL)


def bring_back(scene: Scene) -> None:
    scene.cluster.start_slurmd(scene.place.host)


def cut(scene: Scene) -> None:
    link(scene, "down")


def connect(scene: Scene) -> None:
    link(scene, "up")


def link(scene: Scene, state: str) -> None:
    command = [*scene.cluster.hosts.enter("ctl"), "ip", "link", "set", f"to-{scene.place.host}", state]
    subprocess.run(command, check=True, env=launch_environment({}))


FAULTS = {
    "kill": Fault(kill),
    "stop": Fault(stop),
    "host": Fault(lose_host, bring_back, takes_host=True),
    "cut": Fault(cut, connect, takes_host=True),
    "crash": Fault(crash, makes_bad=False),
    "error": Fault(raise_error, makes_bad=False),
    "memory": Fault(run_out_of_memory, leave_group, makes_bad=False),
}


@dataclass(frozen=True)
class Outcome:
    fault: str
    seconds: float
    problem: str  # "" where all is as it should be


def places(run: Path, attempt: str) -> list[Place]:
    found = []
    for path in run.glob(f"place-{attempt}-*"):
        host, pid = path.read_text().split()
        found.append(Place(int(path.name.rpartition("-")[2]), host, int(pid)))
    return sorted(found, key=lambda one: one.rank)


def steps(run: Path) -> list[tuple[str, int, float]]:
    path = run / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(attempt, int(step), float(when)) for attempt, step, when in map(str.split, lines)]


def hit(cluster: SlurmCluster, run: Path, name: str, chance: random.Random) -> Outcome:
    """Let a fault happen to the job, wait until it has gone on, and compare where it ran and runs."""
    fault = FAULTS[name]
    wanted = len(steps(run)) + chance.randint(5, 20)
    poll(lambda: len(steps(run)) > wanted, LIMIT, interval=0.05)
    attempt, before, _ = steps(run)[-1]
    ranks = places(run, attempt)
    place = chance.choice([one for one in ranks if not (fault.takes_host and one.host == FIRST_HOST)])
    scene = Scene(cluster, run, place)
    began = time.time()
    fault.strike(scene)
    has_gone_on = poll(lambda: steps(run)[-1][0] != attempt and steps(run)[-1][1] > before, LIMIT, interval=0.05)
    fault.mend(scene)
    if not has_gone_on:
        return Outcome(name, LIMIT, f"rank {place.rank} on {place.host}: it has not gone on")
    new = steps(run)[-1][0]
    seconds = next(when for one, step, when in steps(run) if one == new and step > before) - began
    old_hosts, new_hosts = ({one.host for one in places(run, one)} for one in (attempt, new))
    expected = {place.host} if fault.makes_bad else set()
    left = old_hosts - new_hosts
    problem = "" if left == expected else f"rank {place.rank} on {place.host}: left out {left or 'none'}"
    return Outcome(name, seconds, problem)


def try_job(cluster: SlurmCluster, names: list[str], chance: random.Random) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="distman-keep-") as folder:
        run = Path(folder)
        outcomes: list[Outcome] = []

        def meanwhile(job: BatchJob) -> None:
            try:
                outcomes.extend(hit(cluster, run, name, chance) for name in names)
            finally:
                (run / "end").touch()
            if any(outcome.seconds >= LIMIT for outcome in outcomes):
                job.cancel()

        keep = f"{sys.executable} -m distman keep --spare {SPARE} --folder {run}"
        script = f"#!/bin/bash\n{keep} -- srun {sys.executable} {JOB} {run}\n"
        options = [f"--nodes={NUM_NODES}", "--ntasks-per-node=1", "--no-kill"]
        env = {"DISTMAN_SILENCE_TIMEOUT": SILENCE, "PYTHONPATH": str(JOB.parents[1])}
        done = cluster.sbatch(script, *options, env=env, timeout=LIMIT, meanwhile=meanwhile)
        if done.returncode:
            outcomes.append(Outcome("end", 0.0, f"exit code {done.returncode}"))
        return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    outcomes: list[Outcome] = []
    with SlurmCluster(NUM_NODES) as cluster:
        for _ in range(arguments.jobs):
            names = chance.choices(arguments.faults, k=SPARE)
            for outcome in try_job(cluster, names, chance):
                outcomes.append(outcome)
                print(f"TRIAL {outcome.fault:8} {outcome.seconds:6.1f} s  {outcome.problem or 'right'}", flush=True)
    for name in arguments.faults:
        if any(one.fault == name for one in outcomes):
            print(f"TRIALS {name:8} {summary([one for one in outcomes if one.fault == name])}")
    print(f"TRIALS all      {summary(outcomes)}")
    return 1 if any(one.problem for one in outcomes) else 0


def summary(outcomes: list[Outcome]) -> str:
    seconds = [one.seconds for one in outcomes]
    wrong = sum(bool(one.problem) for one in outcomes)
    median = statistics.median(seconds)
    return f"{len(outcomes)} faults, {wrong} wrong, median {median:.1f} s, at most {max(seconds):.1f} s"


if __name__ == "__main__":
    sys.exit(main())
