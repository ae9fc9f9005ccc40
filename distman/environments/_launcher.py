"""All that distman knows of one launcher, as a record: what it sets, and what it does."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from distman.environments._base import FIELD_NAMES, Environ, Fields, LaunchEnvironment, read_fields, read_text

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class Family(enum.Enum):
    """Of what kind a launcher is: what bare ``RANK`` and ``WORLD_SIZE`` mean beside its variables.

    Attributes:
        ENV: They are its own variables. ``method="env"`` means it too.
        MPI: They contradict it where they differ, which is an error. ``method="mpi"`` means it too, and mpi4py can tell
            its ranks where to meet.
        STEP: A scheduler's step: they are right where they differ, since a launcher inside the step set them.
        NONE: No launcher: one process.

    Example:
        >>> [name for name, launcher in LAUNCHERS.items() if launcher.family is Family.MPI]
        ['openmpi', 'hydra', 'mvapich', 'pals']
    """

    ENV = "env"
    MPI = "mpi"
    STEP = "step"
    NONE = "none"


class OnFailure(enum.Enum):
    """What a launcher does once a rank exits with an error.

    Attributes:
        ENDS_JOB: It ends the other ranks.
        NEEDS_ABORT: It ignores exit codes. It ends the other ranks if this one asks for that over PMI, or dies of a
            signal.
        WAITS: It waits for the other ranks, so these must be told.

    Example:
        >>> LAUNCHERS["slurm"].on_failure
        <OnFailure.WAITS: 'waits'>
    """

    ENDS_JOB = "ends_job"
    NEEDS_ABORT = "needs_abort"
    WAITS = "waits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """A process of the launcher on each host, one of which may serve a store, and which may start the ranks again.

    Attributes:
        is_serving: Returns whether one of them serves a store at the address and port that the ranks are told.
        may_be_safe: Returns, of the environment and the name of the job, whether strangers may be unable to run code as
            the user; False where the variables tell otherwise.
        restart_count: The variable that counts how often the ranks were started again.

    Example:
        >>> LAUNCHERS["torchrun"].agent.restart_count
        'TORCHELASTIC_RESTART_COUNT'
    """

    is_serving: Callable[[Environ], bool]
    may_be_safe: Callable[[Environ, str], bool]
    restart_count: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank of a job stands that exists on paper only; its hosts are called ``n1``, ``n2``, ...

    Attributes:
        rank: Index of the rank in the job.
        local_rank: Its index on its host.
        node_rank: Index of its host.
        counts: Number of ranks on each host.
        main_address: The first host.
        main_port: A port.
        job_id: Name of the job.

    Example:
        >>> place = Place(rank=3, local_rank=1, node_rank=1, counts=(2, 2))
        >>> place.host, place.local_world_size, place.world_size
        ('n2', 2, 4)
    """

    rank: int
    local_rank: int
    node_rank: int
    counts: tuple[int, ...]
    main_address: str = "n1"
    main_port: int = 29400
    job_id: str = "1000"

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return sum(self.counts)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this host."""
        return self.counts[self.node_rank]

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return len(self.counts)

    @property
    def host(self) -> str:
        """Name of this host."""
        return f"n{self.node_rank + 1}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Variables:
    """Variables that say a rank's place, and how they are read."""

    name: str
    fields: Fields
    marks: tuple[tuple[str, ...], ...] = ()
    derived: Mapping[str, Callable[[Environ], int | str | None]] = dataclasses.field(default_factory=dict)
    # By a factory: a function on the class would be a method.
    why_not: Callable[[Environ], str | None] = dataclasses.field(default_factory=lambda: lambda _environ: None)

    def __post_init__(self) -> None:
        _check_names("fields", self.fields, FIELD_NAMES, self.name)
        _check_names("derived", self.derived, self.fields, self.name)

    def read(self, environ: Environ) -> LaunchEnvironment | None:
        """Return what the launcher says about this process, or None where it did not start it.

        Local.

        Args:
            environ: Environment variables, usually ``os.environ``.

        Raises:
            LaunchEnvironmentError: A variable is not a number, or two contradict each other.

        Example:
            >>> environment = LAUNCHERS["slurm"].read(fake_environment("slurm", tasks=2)[1])
            >>> environment.rank, environment.world_size, LAUNCHERS["slurm"].read({})
            (1, 2, None)
        """
        if not all(read_text(environ, *names) for names in self.marks) or self.why_not(environ) is not None:
            return None
        return read_fields(self.name, self.fields, self.derived, environ)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation(_Variables):
    """What a scheduler says to every process of an allocation, also to those that its launcher did not start.

    Attributes:
        name: Name of the launcher.
        title: Name of the scheduler, for messages.
        command: The command that starts ranks in the allocation.
        fields: As of :class:`Launcher`. Those of rank and world size, if it has both, are believed where the launcher
            is asked for by name; without that of the job id nobody is told of an allocation that stands idle.
        derived: As of :class:`Launcher`.

    Example:
        >>> allocation = LAUNCHERS["slurm"].allocation
        >>> allocation.title, allocation.command, allocation.tells_place
        ('Slurm', 'srun', True)
    """

    title: str
    command: str

    @property
    def tells_place(self) -> bool:
        """Whether it says which rank of how many a process is."""
        return bool(self.fields.get("rank") and self.fields.get("world_size"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launcher(_Variables):
    """One launcher: the variables that it sets, and how it behaves.

    What has no default must be said for every launcher. A default means that there is nothing of the kind, but for
    ``may_bind_gpus``: a launcher of which nothing is known may do so.

    Attributes:
        name: As ``LaunchEnvironment.launcher`` and ``method`` spell it: lower case.
        family: Of what kind it is.
        fields: Field of :class:`LaunchEnvironment` -> spellings of the variable that holds it, the preferred one first.
        variables: Patterns, such as ``"SLURM_*"``, of the names of its other variables. The test kit starts its workers
            without any of a launcher's variables.
        on_failure: What it does once a rank exits with an error.
        marks: Variables, with their spellings, without which it did not start this process, beside those of rank and
            world size.
        derived: Field -> function of the environment, for fields whose variable is not simply the value.
        why_not: Says why it did not start this process although its variables are set; None where it did.
        imitated_by: Names of launchers that set its variables too; they are believed where they agree with it.
        allocation: What its scheduler says to processes that it did not start itself.
        meets_on_first_node: Whether its main address is that of the first node: then the first task there opens the
            store, whatever its rank is. Otherwise rank 0 does, and the main address is a guess that MPI may correct.
        agent: Its own process on each host, if one of them may serve a store.
        process_names: How the names of its processes on each host begin, of which the ranks are children. The pid of
            such a process names a job on one node where nothing else does.
        expected_hosts: Returns the host of each rank, in rank order; nothing where that cannot be told.
        cancel_command: Returns the command that ends the job, for a launcher that waits although a rank is stuck;
            nothing where the job is not known.
        may_bind_gpus: Whether it may show each rank a GPU of its own.
        has_own_gpus: Returns whether it is known that no other rank sees the GPUs that this process sees.
        uses_munge: Whether munge may run on its hosts, by which its scheduler knows users.
        shows_errors: Whether it prints at the end why a rank failed, as it reads in the rank's error file: then the
            rank need not.
        ends_leftovers: Whether it ends what is left on a host when the last rank there has ended.
        fake: Returns what it sets beside the first spelling of each field, or instead of the field's plain value, for
            :func:`distman.testing.fake_environment`; a variable that is empty is left out.

    Example:
        >>> launcher = LAUNCHERS["torchrun"]
        >>> launcher.fields["local_rank"], launcher.family.value, launcher.on_failure.value
        (('LOCAL_RANK',), 'env', 'ends_job')
    """

    family: Family
    variables: tuple[str, ...]
    on_failure: OnFailure
    imitated_by: tuple[str, ...] = ()
    allocation: Allocation | None = None
    meets_on_first_node: bool = False
    agent: Agent | None = None
    process_names: tuple[str, ...] = ()
    expected_hosts: Callable[[Environ], list[str]] = dataclasses.field(default_factory=lambda: lambda _environ: [])
    cancel_command: Callable[[Environ], Sequence[str]] | None = None
    may_bind_gpus: bool = True
    has_own_gpus: Callable[[Environ], bool] = dataclasses.field(default_factory=lambda: lambda _environ: False)
    uses_munge: bool = False
    shows_errors: bool = False
    ends_leftovers: bool = False
    fake: Callable[[Place], dict[str, str]] = dataclasses.field(default_factory=lambda: lambda _place: {})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "name must be lower-case letters, digits, '-' and '_', and begin with a letter, got "
                f"{self.name!r}. Choose such a name."
            )


def sets(launcher: Launcher, name: str) -> bool:
    """Return whether a variable of this name is a launcher's."""
    return any(name in names for names in (*launcher.fields.values(), *launcher.marks)) or any(
        fnmatch.fnmatchcase(name, pattern) for pattern in launcher.variables
    )


def fake_variables(launcher: Launcher, place: Place) -> dict[str, str]:
    """Return the variables that a launcher would set for a rank."""
    plain = {names[0]: str(getattr(place, field)) for field, names in launcher.fields.items() if names}
    return {name: value for name, value in (plain | launcher.fake(place)).items() if value}


def _check_names(what: str, names: Iterable[str], valid: Iterable[str], launcher: str) -> None:
    unknown = {*names} - {*valid}
    if unknown:
        raise ValueError(
            f"{what} of launcher {launcher!r} must be among {', '.join(valid)}, got {', '.join(sorted(unknown))}. "
            "Correct the names."
        )
