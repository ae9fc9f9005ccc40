"""What a launcher says about one process, as a value, and how it is read from a table of variables.

The table serves twice: to read the values, and to say afterwards where each value came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from distman.environments._registry import LAUNCHERS
from distman.errors import LaunchEnvironmentError

Environ = Mapping[str, str]

# Field of LaunchEnvironment -> spellings of the variable that holds it, the preferred one first.
Fields = Mapping[str, tuple[str, ...]]

JOB_ID = "DISTMAN_JOB_ID"  # the user's own job id; it stands above every launcher's

MAX_DIGITS = 18  # longer numbers are typing errors: every launcher's own numbers fit into 64 bits

_NONE = "single"
# The fields that are numbers, each with its smallest value.
_LEAST = {
    "rank": 0,
    "world_size": 1,
    "local_rank": 0,
    "local_world_size": 1,
    "node_rank": 0,
    "num_nodes": 1,
    "main_port": 1,
}
_RELATIONS = (
    ("rank", "below", "world_size"),
    ("local_rank", "below", "local_world_size"),
    ("node_rank", "below", "num_nodes"),
    ("local_world_size", "at most", "world_size"),
)


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
    """What one launcher says about this process; ``None`` where it is silent.

    Attributes:
        launcher: Name of one of :data:`LAUNCHERS`.
        rank: Index of this process in the job, ``0 <= rank < world_size``.
        world_size: Number of processes in the job.
        local_rank: Index of this process on its host.
        local_world_size: Number of the job's processes on this host.
        node_rank: Index of this host among the job's hosts.
        num_nodes: Number of hosts in the job.
        main_address: Host on which the ranks meet.
        main_port: TCP port on which the ranks meet.
        job_id: A text that is the same on all ranks of this job and different in other jobs.

    Example:
        >>> environment = detect(fake_environment("slurm", nodes=2, tasks=4)[3]).environment
        >>> environment.launcher, environment.rank, environment.local_rank, environment.main_address
        ('slurm', 3, 1, 'n1')
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    main_address: str | None = None
    main_port: int | None = None
    job_id: str | None = None

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {self.launcher!r}.")
        _check(vars(self), lambda field: f"{field}={getattr(self, field)}", self.launcher)

    @classmethod
    def lone(cls) -> LaunchEnvironment:
        """Return what is known of one process that no launcher started.

        Local.
        """
        return cls(_NONE, 0, 1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process as a rank of a job, be it the only one."""
        return self.launcher != _NONE

    @property
    def is_on_one_node(self) -> bool:
        """Whether the launcher says that all ranks of the job run on this host."""
        return self.world_size == 1 or self.num_nodes == 1 or self.local_world_size == self.world_size


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(LaunchEnvironment) if field.name != "launcher")


def read_text(environ: Environ, *names: str) -> str | None:
    """Return the first of the variables ``names`` that is set and not blank."""
    values = (environ.get(name, "").strip() for name in names)
    return next((value for value in values if value), None)


def read_host(environ: Environ, *names: str) -> str | None:
    """Return such a text where it is the name or address of a host; one of IPv6 may be in brackets, as in a URL."""
    text = read_text(environ, *names)
    return text[1:-1] if text is not None and text.startswith("[") and text.endswith("]") else text


def read_flag(environ: Environ, name: str, *, default: bool = False) -> bool:
    """Return whether the variable says yes: ``1``, ``true`` or ``yes``, in any case."""
    text = read_text(environ, name)
    return default if text is None else text.lower() in ("1", "true", "yes")


def read_number(environ: Environ, *names: str, least: int = 0) -> int | None:
    """Return the first of the variables that is set, as a number of at least ``least``."""
    name = next((name for name in names if read_text(environ, name)), None)
    if name is None:
        return None
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS) or int(text) < least:
        raise LaunchEnvironmentError(
            f"{name} must be a whole number of at least {least}, got {name}={text!r} from the environment. "
            "Correct or unset it."
        )
    return int(text)


def read_fields(
    launcher: str, fields: Fields, derived: Mapping[str, Callable[[Environ], int | str | None]], environ: Environ
) -> LaunchEnvironment | None:
    """Return the launcher's values, or None where it gives no rank or no world size.

    ``derived`` replaces the plain reading of a field.
    """
    values = {
        field: derived[field](environ) if field in derived else _read(field, names, environ)
        for field, names in fields.items()
    }
    if values.get("rank") is None or values.get("world_size") is None:
        return None
    # A derived value may have no variable of its own.
    _check(values, lambda field: source_of(field, fields, environ) or f"{field}={values[field]}", "the environment")
    said: dict[str, Any] = values | {"job_id": read_text(environ, JOB_ID) or values.get("job_id")}
    return LaunchEnvironment(launcher, **said)


def _read(field: str, names: tuple[str, ...], environ: Environ) -> int | str | None:
    if field in _LEAST:
        return read_number(environ, *names, least=_LEAST[field])
    return read_host(environ, *names) if field == "main_address" else read_text(environ, *names)


def source_of(field: str, fields: Fields, environ: Environ) -> str | None:
    """Return ``NAME=value`` of the variable that holds ``field``, or None where none is set."""
    names = (JOB_ID, *fields.get(field, ())) if field == "job_id" else fields.get(field, ())
    name = next((name for name in names if read_text(environ, name)), None)
    return None if name is None else f"{name}={read_text(environ, name)}"


def _check(values: Mapping[str, Any], said: Callable[[str], str], source: str) -> None:
    """Raise LaunchEnvironmentError where values cannot be; ``said`` returns ``NAME=value`` of a field's variable."""
    known = {field: value for field, value in values.items() if value is not None}
    for field, least in _LEAST.items():
        if known.get(field, least) < least:
            raise LaunchEnvironmentError(
                f"{_name(said(field))} must be at least {least}, got {said(field)} from {source}. Correct or unset it."
            )
    for first, relation, second in _RELATIONS:
        if {first, second} <= known.keys() and known[first] >= known[second] + (relation == "at most"):
            names = f"{_name(said(first))} must be {relation} {_name(said(second))}"
            raise LaunchEnvironmentError(
                f"{names}, got {said(first)} and {said(second)} from {source}. Correct or unset them; one launcher "
                "sets both."
            )
    if known.get("main_port", 1) > 65535:
        port = said("main_port")
        raise LaunchEnvironmentError(
            f"{_name(port)} must be between 1 and 65535, got {port} from {source}. Set it to a free port, or unset it."
        )


def _name(source: str) -> str:
    return source.partition("=")[0]
