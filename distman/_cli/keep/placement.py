"""Where the next try of a job runs: the command for it, without the hosts that are bad."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from distman._base import timing
from distman._cli.keep.verdict import Health
from distman._coordination.failure.starter import count_oom_kills
from distman.environments import parse_hostlist

# Of srun: those that have a value, and those that have none, or only one in the same word.
# Source: Slurm documentation, srun; those of versions up to 25.05.
_OPTIONS = (
    """
    A B b C c D d e F G i J L M m N n o p q r S T t W w x accel-bind account acctg-freq bb bbf bcast-exclude begin
    chdir cluster-constraint clusters comment constraint container container-id core-spec cores-per-socket cpu-bind
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution epilog error exclude export
    extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags
    het-group hint input job-name jobid licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus mpi msg-timeout network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket ntasks-per-tres open-mode output partition power prefer priority profile prolog qos relative
    reservation segment signal slurmd-debug sockets-per-node switches task-epilog task-prolog thread-spec threads
    threads-per-core time time-min tmp treewidth tres-bind tres-per-task uid wait wckey
    """,
    """
    I k K bcast compress consolidate-segments contiguous disable-status exact exclusive external help hold immediate
    interactive kill-on-bad-exit label multi-prog nice no-allocate no-kill oom-kill-step overcommit overlap
    oversubscribe preserve-env propagate pty quiet quit-on-interrupt reboot resv-ports send-libs spread-job stepmgr
    test-only unbuffered usage use-min-nodes verbose version whole x11
    """,
)
_WITH_VALUE, _ALONE = (frozenset(names.split()) for names in _OPTIONS)
_FLAGS = "EhHlOQsuvVXZ"  # short options that have no value: one word may hold several, and one of the others at its end


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


class InAllocation:
    """Starts each try by srun, on the good hosts of a Slurm allocation."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], spare: int, min_nodes: int | None) -> None:
        nodes, tasks, self._options = read_options(command[1:])
        self._srun = command[0]
        self._job = environ["SLURM_JOB_ID"]
        self.hosts = tuple(parse_hostlist(environ["SLURM_JOB_NODELIST"]))
        self._wanted = nodes or len(self.hosts) - spare
        if not 1 <= self._wanted <= len(self.hosts) - spare:
            raise ValueError(
                f"{len(self.hosts)} nodes are too few for {self._wanted} and {spare} spare ones. Ask for more nodes "
                "with sbatch --nodes, or for fewer with --spare."
            )
        all_tasks = environ.get("SLURM_NTASKS")
        self._tasks = tasks or (int(all_tasks) * self._wanted // len(self.hosts) if all_tasks else None)
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
        return [self._srun, *options, *self._options]

    def lacks_hosts(self, bad_hosts: Collection[str]) -> str | None:
        left = self._num_nodes(bad_hosts)
        if left >= self._min_nodes:
            return None
        return f"{left} of {len(self.hosts)} nodes are left, and the job needs {self._min_nodes}"

    def _num_nodes(self, bad_hosts: Collection[str]) -> int:
        return min(self._wanted, len(set(self.hosts) - set(bad_hosts)))

    def check(self, host: str) -> Health:
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
    """Return where tries of a command run; ValueError where that and the options do not go together."""
    if Path(command[0]).name == "srun" and "SLURM_JOB_NODELIST" in environ:
        return InAllocation(command, environ, spare, min_nodes)
    if spare or min_nodes:
        raise ValueError(
            "--spare and --min-nodes need `srun` in an allocation of Slurm, which can leave hosts out. Start it within "
            "sbatch or salloc, or leave them away."
        )
    return Here(command)


def read_options(words: Sequence[str]) -> tuple[int | None, int | None, list[str]]:
    """Return how many nodes and tasks the options of srun ask for, and all other words; ValueError if unclear."""
    numbers: dict[str, int | None] = {"-N": None, "-n": None}
    long = {"--nodes": "-N", "--ntasks": "-n"}
    rest: list[str] = []
    words = list(words)
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        flags, name, value = _parts_of(word)
        own = [word]
        if value is None and _has_value(name, words):
            own += words[:1]
            value = words.pop(0) if words else ""
        if name in ("-w", "--nodelist", "-x", "--exclude"):
            raise ValueError(f"{name} chooses hosts, as `distman keep` does. Leave it out of the srun command.")
        short = long.get(name, name)
        if short in numbers:
            if value is None or not value.isdecimal():
                raise ValueError(
                    f"{name} must be a number, got {value!r}. Write, for example, {name}{'=' * (name != short)}4."
                )
            numbers[short], own = int(value), flags
        rest += own
    return numbers["-N"], numbers["-n"], [*rest, *words]


def _parts_of(word: str) -> tuple[list[str], str, str | None]:
    """Return the flags in a word, the option after them, and the value of that, if it is in this word."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return [], name, value if equals else None
    option = word[1:].lstrip(_FLAGS)
    flags = word.removesuffix(option)
    return [flags] if flags != "-" else [], f"-{option[:1]}", option[1:] or None


def _has_value(name: str, words: Sequence[str]) -> bool:
    """Return whether the next one of some words is the value of an option that has none in its own word."""
    option = name.lstrip("-")
    if option and option not in _WITH_VALUE | _ALONE and words and not words[0].startswith("-"):
        raise ValueError(
            f"{name} must be an option of srun that `distman keep` knows, got one before {words[0]!r}, which may be "
            f"its value or the program. Write {name}{'=' * name.startswith('--')}{words[0]}, or -- before the program."
        )
    return option in _WITH_VALUE
