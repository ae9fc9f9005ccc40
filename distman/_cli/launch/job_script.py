"""Job scripts: what a job asks for, checked, and put into the template of its scheduler or launcher."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import string
from importlib.resources import files

BACKENDS = ("slurm", "openmpi", "mpich", "pbs", "lsf", "flux", "torchrun")  # for which there is a template of this name
_WORD = re.compile(r"\w[\w.+@-]*", re.ASCII)
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_TIME_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
# Characters that stand for themselves in ``$'...'``.
_PLAIN = frozenset(string.printable.encode()) - frozenset(string.whitespace.encode()) - set(b"\\'") | set(b" ")
_PLACEHOLDER = re.compile(r"@\{(\w+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What a job asks for; ValueError where a value does not go with the backend."""

    backend: str
    nodes: int = 1
    gpus_per_node: int = 1  # as many processes; 0 for a job on CPUs
    tasks_per_node: int | None = None  # of a job on CPUs
    gpu_type: str | None = None  # what Slurm calls the GPUs, such as "a100"
    cpus_per_task: int = 8  # for each process
    time: str = "24:00:00"  # HH:MM:SS
    account: str | None = None  # None leaves a line to edit
    partition: str | None = None  # others call it a queue; None leaves a line to edit
    job_name: str = "train"
    with_torchrun: bool = False  # whether ``srun`` starts one torchrun on each node
    spare_nodes: int = 0  # beside ``nodes``, for ``distman keep``
    restarts: int | None = None  # of ``distman keep``; None is its default, and none without spare nodes
    program: tuple[str, ...] = ("train.py",)  # what would follow ``python``

    def __post_init__(self) -> None:
        if self.with_torchrun and self.backend != "slurm":
            raise ValueError(f"--with-torchrun must be used with --backend slurm, got {self.backend}. Leave it out.")
        if self.gpu_type is not None and (self.backend != "slurm" or not self.gpus_per_node):
            raise ValueError(
                f"--gpu-type must be used with --backend slurm and at least one GPU, got {self.gpu_type!r} with "
                f"{self.backend} and {self.gpus_per_node} GPUs. Leave it out."
            )
        if self.is_kept and (self.backend != "slurm" or self.with_torchrun):
            raise ValueError(
                "--spare-nodes and --restarts must be used with --backend slurm and without --with-torchrun. Leave "
                "them out, or write `distman keep --` in front of the launcher by hand."
            )
        if self.tasks_per_node is not None and self.gpus_per_node:
            raise ValueError(
                f"--tasks-per-node must be left out where there are GPUs, got {self.tasks_per_node} with "
                f"{self.gpus_per_node} GPUs. Each GPU has one process; pass --gpus-per-node=0 for a job on CPUs."
            )
        for name in ("job_name", "account", "partition", "gpu_type"):
            value = getattr(self, name)
            if value is not None and not _WORD.fullmatch(value):
                raise ValueError(
                    f"--{name.replace('_', '-')} must consist of letters, digits and . _ + @ -, got {value!r}. Choose "
                    "another name."
                )
        first, *rest = self.program or ("",)
        is_module = first == "-m" and rest
        if not is_module and (not first or first.startswith("-") or _PYTHON.fullmatch(first)):
            raise ValueError(
                f"the program must begin with a script, or with -m and a module, got {first!r}. Name what would follow "
                "python."
            )

    @property
    def tasks(self) -> int:
        """Number of processes on each node."""
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def is_kept(self) -> bool:
        """Whether ``distman keep`` starts the job again."""
        return bool(self.spare_nodes) or self.restarts is not None

    @property
    def file_name(self) -> str:
        return f"{self.job_name}.sh"


def read_time(text: str) -> str:
    """Return a time as ``"HH:MM:SS"``, from ``"2h30m"`` and the like, or as ``--time`` of sbatch(1) has it."""
    seconds = 0
    if match := _TIME_WITH_UNITS.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif match := _SLURM_TIME.fullmatch(text):
        day, *parts = match.groups()
        numbers = [int(part) for part in parts if part is not None]
        if day is None and len(numbers) < 3:  # minutes, perhaps with seconds
            numbers = [0, *numbers]
        hours, minutes, rest = [*numbers, 0, 0][:3]
        seconds = ((int(day or 0) * 24 + hours) * 60 + minutes) * 60 + rest
    if not seconds:
        raise ValueError(
            f"--time must be a time such as 90m, 2h30m, 01:30:00 or 1-12:00:00, got {text!r}. Write one hour as 1h."
        )
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def quoted(word: str) -> str:
    """Return a word as bash reads it, on one line: a line that begins within it might be taken for the script's."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(f"\\x{byte:02x}" if byte not in _PLAIN else chr(byte) for byte in os.fsencode(word)) + "'"


def as_argument(path: str) -> str:
    """Return the path of a file so that no program takes it for an option."""
    return f"./{path}" if path.startswith("-") else path


def render(request: JobRequest, file_name: str | None = None) -> str:
    """Return the job script, whose comments call it ``file_name``; a line goes where one of its values is None."""
    name = "slurm_torchrun" if request.with_torchrun else request.backend
    template = files("distman._cli.launch").joinpath("templates", f"{name}.sh").read_text(encoding="utf-8")
    values = _values(request) | {"file": quoted(as_argument(file_name or request.file_name))}
    lines = template.splitlines(keepends=True)
    kept = [line for line in lines if None not in [values[name] for name in _PLACEHOLDER.findall(line)]]
    return _PLACEHOLDER.sub(lambda match: values[match[1]] or "", "".join(kept))


def _values(request: JobRequest) -> dict[str, str | None]:
    tasks, gpus, cpus = request.tasks, request.gpus_per_node, request.cpus_per_task
    hours, minutes, seconds = (int(part) for part in request.time.split(":"))
    all_minutes = max(1, hours * 60 + minutes + (seconds > 0))
    script = " ".join(map(quoted, request.program))
    return {
        "job": "A job of one process" if request.nodes * tasks == 1 else f"A job of {request.nodes * tasks} processes",
        "place": _place(request),
        "unit": "for each GPU" if gpus else f"for each task, {tasks} on each node" if tasks > 1 else "on each node",
        "name": request.job_name,
        "nodes": str(request.nodes),
        "all_nodes": str(request.nodes + request.spare_nodes),
        "kept": "" if request.is_kept else None,
        "keep": _keep(request),
        "several": "" if request.nodes > 1 else None,
        "alone": "" if request.nodes == 1 else None,
        "tasks": str(tasks),
        "num_tasks": str(request.nodes * tasks),
        "gpus": str(gpus),
        "gpus_per_task": "1" if gpus else None,
        "typed_gpus": ":".join(filter(None, (request.gpu_type, str(gpus)))) if gpus else None,
        "pbs_gpus": f":ngpus={gpus}" if gpus else "",
        "cpus": str(cpus),
        "cpus_per_node": str(cpus * tasks),
        "time": request.time,
        "hours_and_minutes": f"{all_minutes // 60:02}:{all_minutes % 60:02}",
        "minutes": str(all_minutes),
        "account": request.account or "ACCOUNT",
        "account_off": "" if request.account else "#",
        "partition": request.partition or "PARTITION",
        "partition_off": "" if request.partition else "#",
        # How to tell torchrun's agents where they meet.
        "torchrun_where": (
            " on each node at about the same time, with the name of one of them and a number"
            if request.nodes > 1
            else ""
        ),
        "torchrun_first": " node1 0" if request.nodes > 1 else "",
        "program": f"python {script}",
        "script": script,
    }


def _keep(request: JobRequest) -> str:
    """Return what begins the command that starts the job; "" where nothing starts it again."""
    if not request.is_kept:
        return ""
    restarts = [] if request.restarts is None else [f"--restarts {request.restarts}"]
    return " ".join(["distman keep", *restarts, f"--spare {request.spare_nodes}", "-- "])


def _place(request: JobRequest) -> str:
    nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
    gpus = request.gpus_per_node
    what = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else f"{request.tasks * request.cpus_per_task} CPUs"
    return f"{nodes} with {what}{' each' * (request.nodes > 1)}"
