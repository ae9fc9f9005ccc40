"""What a launcher says about one process, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from distman.environments._registry import LAUNCHERS
from distman.errors import LaunchEnvironmentError

_BARE, _NONE = "env", "single"

MAX_DIGITS = 18
"""Longer numbers are typing errors: every launcher's own numbers fit into 64 bits."""


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
        self._check_index("rank", self.rank, "world_size", self.world_size)
        self._check_index("local_rank", self.local_rank, "local_world_size", self.local_world_size)
        self._check_index("node_rank", self.node_rank, "num_nodes", self.num_nodes)
        if self.local_world_size is not None and self.local_world_size > self.world_size:
            raise LaunchEnvironmentError(
                f"local_world_size must be at most world_size, got {self.local_world_size} of "
                f"{self.world_size} from {self.launcher}. Start the job with one launcher only."
            )
        if self.main_port is not None and not 0 < self.main_port < 65536:
            raise LaunchEnvironmentError(
                f"main_port must be between 1 and 65535, got {self.main_port} from {self.launcher}. "
                "Set MASTER_PORT to a free port, or unset it."
            )

    def _check_index(self, name: str, index: int | None, count_name: str, count: int | None) -> None:
        if count is not None and count < 1:
            raise LaunchEnvironmentError(
                f"{count_name} must be at least 1, got {count} from {self.launcher}. Check how the job was started."
            )
        if index is not None and (index < 0 or (count is not None and index >= count)):
            raise LaunchEnvironmentError(
                f"{name} must be at least 0 and below {count_name}, got {name} {index} of "
                f"{count_name} {count} from {self.launcher}. Check how the job was started."
            )

    @classmethod
    def lone(cls) -> LaunchEnvironment:
        """Return what is known of one process that no launcher started.

        Local.
        """
        return cls(_NONE, 0, 1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)

    @classmethod
    def bare(cls, rank: int, world_size: int) -> LaunchEnvironment:
        """Return what is known of a rank whose launcher is not, such as that of a process group of other code.

        Local.

        Args:
            rank: Index of this process in the job.
            world_size: Number of processes in the job.

        Raises:
            LaunchEnvironmentError: There is no such rank.

        Example:
            >>> LaunchEnvironment.bare(rank=1, world_size=2).launcher
            'env'
        """
        return cls(_BARE, rank, world_size)

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process as a rank of a job, be it the only one."""
        return self.launcher != _NONE

    @property
    def is_on_one_node(self) -> bool:
        """Whether the launcher says that all ranks of the job run on this host."""
        return self.world_size == 1 or self.num_nodes == 1 or self.local_world_size == self.world_size


def read_text(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the first of the variables ``names`` that is set and not blank."""
    values = (environ.get(name, "").strip() for name in names)
    return next((value for value in values if value), None)


def read_host(environ: Mapping[str, str], *names: str) -> str | None:
    """Return such a text where it is the name or address of a host; one of IPv6 may be in brackets, as in a URL."""
    text = read_text(environ, *names)
    return text[1:-1] if text is not None and text.startswith("[") and text.endswith("]") else text


def read_flag(environ: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """Return whether the variable says yes: ``1``, ``true`` or ``yes``, in any case."""
    text = read_text(environ, name)
    return default if text is None else text.lower() in ("1", "true", "yes")


def read_index(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of the variables that is set, as a number of at least 0."""
    return _read_number(environ, names, minimum=0)


def read_count(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of the variables that is set, as a number of at least 1."""
    return _read_number(environ, names, minimum=1)


def _read_number(environ: Mapping[str, str], names: tuple[str, ...], *, minimum: int) -> int | None:
    name = next((name for name in names if environ.get(name, "").strip()), None)
    if name is None:
        return None
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS) or int(text) < minimum:
        raise LaunchEnvironmentError(
            f"{name} must be a whole number of at least {minimum}, got {name}={text!r} from the environment. "
            "Correct or unset it."
        )
    return int(text)
