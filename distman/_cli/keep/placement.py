"""Where the next try of a job runs: the command for it, without the hosts that are bad."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from distman._base import timing
from distman._cli.keep.verdict import Health
from distman._coordination.failure.starter import count_oom_kills
from distman.environments import parse_hostlist


class Here:
    """Starts each try as the first one: on this machine, or wherever its launcher will."""

    hosts: tuple[str, ...] = ()

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def next_command(self, _bad_hosts: Collection[str]) -> list[str]:
        return self._command

    def lacks_hosts(self, _bad_hosts: Collection[str]) -> str | None:
        return None

    def check(self, _host: str) -> Health:
        return Health(None, count_oom_kills())

    def end_step(self, _step: str | None) -> None:
        """Leave it to the launcher."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What srun was told of nodes, and the rest of its command."""

    nodes: int | None
    tasks: int | None
    rest: tuple[str, ...]


class InAllocation:
    """Starts each try by srun, on the good hosts of a Slurm allocation."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], spare: int, min_nodes: int | None) -> None:
        self._options = read_options(command[1:])
        self._srun = command[0]
        self._job = environ["SLURM_JOB_ID"]
        self.hosts = tuple(parse_hostlist(environ["SLURM_JOB_NODELIST"]))
        self._wanted = self._options.nodes or len(self.hosts) - spare
        if not 1 <= self._wanted <= len(self.hosts) - spare:
            raise ValueError(
                f"{len(self.hosts)} nodes are too few for {self._wanted} and {spare} spare ones. Ask for more nodes "
                "with sbatch --nodes, or for fewer with --spare."
            )
        tasks = environ.get("SLURM_NTASKS")
        all_tasks = int(tasks) * self._wanted // len(self.hosts) if tasks else None
        self._tasks = self._options.tasks or all_tasks
        self._min_nodes = min_nodes or self._wanted
        self._has_tried = False
        self._ends: list[subprocess.Popen[bytes]] = []

    def next_command(self, bad_hosts: Collection[str]) -> list[str]:
        nodes = self._num_nodes(bad_hosts)
        options = [f"--nodes={nodes}"]
        if self._tasks is not None:
            options.append(f"--ntasks={self._tasks * nodes // self._wanted}")
        if bad_hosts:
            options.append(f"--exclude={','.join(sorted(bad_hosts))}")
        if self._has_tried:  # that try may still be ending, on a host that does not answer
            options.append("--overlap")
        self._has_tried = True
        return [self._srun, *options, *self._options.rest]

    def lacks_hosts(self, bad_hosts: Collection[str]) -> str | None:
        """Return why there can be no further try, or None."""
        left = self._num_nodes(bad_hosts)
        if left >= self._min_nodes:
            return None
        return f"{left} of {len(self.hosts)} nodes are left, and the job needs {self._min_nodes}"

    def _num_nodes(self, bad_hosts: Collection[str]) -> int:
        return min(self._wanted, len(set(self.hosts) - set(bad_hosts)))

    def check(self, host: str) -> Health:
        """Run ``distman check --quick`` on a host."""
        place = [self._srun, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--input=none", "--quiet"]
        command = [*place, sys.executable, "-m", "distman", "check", "--quick", "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timing.KEEP_CHECK)
            said = json.loads(done.stdout)
            return Health("; ".join(said["problems"]) or None, said["oom_kills"])
        except subprocess.TimeoutExpired:
            return Health(f"did not answer within {timing.KEEP_CHECK:g} s", 0)
        except ValueError:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return Health(f"cannot be checked ({lines[-1]})", 0)

    def end_step(self, step: str | None) -> None:
        if step is not None:  # not waited for: a host that does not answer keeps scancel for long
            command = ["scancel", "--signal=KILL", f"{self._job}.{step}"]
            self._ends.append(subprocess.Popen(command))


Placement = Here | InAllocation


def place(command: Sequence[str], environ: Mapping[str, str], spare: int, min_nodes: int | None) -> Placement:
    """Return where tries of a command run.

    Raises:
        ValueError: The command, the allocation and the options do not go together.
    """
    if Path(command[0]).name == "srun" and "SLURM_JOB_NODELIST" in environ:
        return InAllocation(command, environ, spare, min_nodes)
    if spare or min_nodes:
        raise ValueError(
            "--spare and --min-nodes need `srun` in an allocation of Slurm, which can leave hosts out. Start it within "
            "sbatch or salloc, or leave them away."
        )
    return Here(command)


def read_options(words: Sequence[str]) -> Options:
    """Return how many nodes and tasks the options of srun ask for, and all the other words.

    Raises:
        ValueError: They choose the hosts by themselves.
    """
    numbers: dict[str, int | None] = {"-N": None, "-n": None}
    long = {"--nodes": "-N", "--ntasks": "-n"}
    rest: list[str] = []
    words = list(words)
    while words and (words[0].startswith("-") or (rest and rest[-1].startswith("-") and "=" not in rest[-1])):
        word = words.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if name in ("-w", "--nodelist", "-x", "--exclude"):
            raise ValueError(f"{name} chooses hosts, as `distman keep` does. Leave it out of the srun command.")
        short = long.get(name, name)
        if short in numbers:
            number = value if equals else words.pop(0) if words else ""
            if not number.isdecimal():
                raise ValueError(
                    f"{name} must be a number, got {number!r}. Write, for example, {name}{'=' * (name != short)}4."
                )
            numbers[short] = int(number)
        else:
            rest.append(word)
    return Options(numbers["-N"], numbers["-n"], (*rest, *words))
