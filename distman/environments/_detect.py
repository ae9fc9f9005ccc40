"""Which launcher started this process: the choice, and its explanation."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping

from distman.environments._base import (
    FIELD_NAMES,
    Environ,
    LaunchEnvironment,
    read_number,
    read_text,
    source_of,
)
from distman.environments._launcher import Allocation, Family, Launcher, sets
from distman.environments._launchers import (
    BARE,
    DISTMAN_RUN,
    FLUX,
    HYDRA,
    JSRUN,
    MVAPICH,
    OPENMPI,
    PALS,
    SINGLE,
    SUBMITIT,
    TORCHRUN,
    is_complete,
)
from distman.environments._registry import LAUNCHERS
from distman.environments._slurm import SLURM
from distman.errors import LaunchEnvironmentError

METHOD = "DISTMAN_INITIALIZATION_METHOD"  # the variable that names the launcher to believe

VARIABLES = (
    "DISTMAN_ALLOW_SHARED_GPU",
    "DISTMAN_DEBUG",
    "DISTMAN_FAILURE_GRACE",
    "DISTMAN_FORBID_SKIP",
    "DISTMAN_END_TIME",
    "DISTMAN_HANG_TIMEOUT",
    "DISTMAN_INITIALIZATION_METHOD",
    "DISTMAN_JOB_ID",
    "DISTMAN_KEEP_FOLDER",
    "DISTMAN_RENDEZVOUS_TIMEOUT",
    "DISTMAN_REQUEUE",
    "DISTMAN_SECRET",
    "DISTMAN_SECRET_FILE",
    "DISTMAN_SHARED_MEMORY",
    "DISTMAN_SILENCE_TIMEOUT",
    "DISTMAN_STOP_MARGIN",
    "DISTMAN_STOP_SIGNALS",
    "DISTMAN_TIMEOUT",
    "DISTMAN_WATCH",
)
"""All variables that begin like this; any other is misspelt."""

_PREFIX = "DISTMAN_"
_FAMILIES = (Family.ENV, Family.MPI)  # families whose name is a method too

# Innermost first: mpirun inside a Slurm job hands its ranks Slurm's variables too.
LAUNCHERS.put(TORCHRUN, DISTMAN_RUN, OPENMPI, HYDRA, MVAPICH, PALS, SUBMITIT, JSRUN, FLUX, SLURM, BARE, SINGLE)


@dataclasses.dataclass(frozen=True)
class Detection:
    """What was chosen, and why.

    Attributes:
        environment: What the chosen launcher says.
        warnings: Sentences that a user should see without asking.
        explanation: Sentences: what was chosen, from which variables, what was passed over and why.

    Example:
        >>> detection = detect({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "3"})
        >>> detection.environment.rank, detection.warnings
        (1, ())
        >>> print(detection.explanation[0])
        env was chosen: rank 1 (RANK=1), world_size 2 (WORLD_SIZE=2)...
    """

    environment: LaunchEnvironment
    warnings: tuple[str, ...]
    explanation: tuple[str, ...] = dataclasses.field(repr=False)

    def require_launcher(self) -> None:
        """Refuse to be distributed where no launcher started this process.

        Local.

        Raises:
            LaunchEnvironmentError: No launcher speaks; the message holds the explanation.
        """
        if not self.environment.is_launched:
            raise LaunchEnvironmentError(
                "use_distributed must be None or False where no launcher started this process, got True. "
                "Start the script with torchrun, mpirun or srun.\n" + "\n".join(self.explanation)
            )


def detect(environ: Mapping[str, str], method: str | None = None) -> Detection:
    """Find out which launcher started this process, and what it says.

    Local. Pure: nothing is read but ``environ``. The first call also loads the entry points ``distman.launchers``.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.
        method: Name of the launcher to believe, any case; also ``"mpi"`` for any MPI. None asks the variable
            ``DISTMAN_INITIALIZATION_METHOD``, then all launchers, the innermost first.

    Returns:
        What the launcher says, and why it was chosen; one process, ``"single"``, where none speaks.

    Raises:
        LaunchEnvironmentError: Variables are missing, not numbers, or contradict each other; the method finds
            nothing; an entry point cannot be loaded.
        ValueError: There is no such method.

    Example:
        >>> detect({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}).environment.launcher
        'openmpi'
        >>> detect({}).environment.launcher
        'single'
    """
    source = "the call" if method is not None else METHOD
    method = read_text(environ, METHOD) if method is None else method
    return _search(environ) if method is None else _believe(method, source, environ)


def explain(environ: Mapping[str, str] | None = None, method: str | None = None) -> str:
    """Return the whole reasoning about this process's launcher, a sentence a line.

    Local. No communication.

    Args:
        environ: Environment variables; None reads ``os.environ``.
        method: See :func:`detect`.

    Raises:
        LaunchEnvironmentError: See :func:`detect`.
        ValueError: There is no such method.

    Example:
        >>> print(explain({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}))
        openmpi was chosen: rank 0 (OMPI_COMM_WORLD_RANK=0), world_size 4 (OMPI_COMM_WORLD_SIZE=4).
        torchrun was passed over: TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE are not set.
        ...
    """
    return "\n".join(detect(os.environ if environ is None else environ, method).explanation)


def spoken(environ: Environ) -> list[LaunchEnvironment]:
    """Return what each launcher says whose variables have a meaning, the innermost first; bare ones where complete."""
    found = []
    for launcher in _asked():
        if launcher is not BARE or is_complete(environ):
            with contextlib.suppress(LaunchEnvironmentError):
                found.append(launcher.read(environ))
    return [environment for environment in found if environment is not None]


def is_env_distributed(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher started this process as a rank of a job, be it the only one.

    Local.

    Args:
        environ: Environment variables; None reads ``os.environ``.

    Raises:
        LaunchEnvironmentError: See :func:`detect`.

    Example:
        >>> is_env_distributed({}), is_env_distributed({"RANK": "0", "WORLD_SIZE": "1"})
        (False, True)
    """
    return detect(os.environ if environ is None else environ).environment.is_launched


def should_use_distributed(use_distributed: bool | None, environ: Mapping[str, str] | None = None) -> bool:  # noqa: FBT001 - the one argument is the question
    """Return whether a program with this wish should start a process group here.

    Local.

    Args:
        use_distributed: True insists on it; False rules it out; None wants it where there are several ranks.
        environ: Environment variables; None reads ``os.environ``.

    Raises:
        LaunchEnvironmentError: It is insisted on where no launcher speaks; or see :func:`detect`.

    Example:
        >>> lone, pair = {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "2"}
        >>> should_use_distributed(None, lone), should_use_distributed(True, lone), should_use_distributed(None, pair)
        (False, True, True)
    """
    if use_distributed is False:
        return False
    detection = detect(os.environ if environ is None else environ)
    if use_distributed:
        detection.require_launcher()
    return use_distributed or detection.environment.world_size > 1


def misspelt_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each variable that begins like distman's, but is not one of them.

    Local.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Example:
        >>> print(*misspelt_variables({"DISTMAN_TIMOUT": "60"}))
        DISTMAN_TIMOUT has no effect, because distman reads no such variable: did you mean DISTMAN_TIMEOUT?
    """
    sentences = []
    for name in sorted(name for name in environ if name.startswith(_PREFIX)):
        if name not in VARIABLES and not any(sets(launcher, name) for launcher in LAUNCHERS.values()):
            ends = [known.removeprefix(_PREFIX) for known in VARIABLES]
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
            meant = f"did you mean {_PREFIX}{close[0]}?" if close else f"distman reads {', '.join(VARIABLES)}."
            sentences.append(f"{name} has no effect, because distman reads no such variable: {meant}")
    return tuple(sentences)


def _asked() -> list[Launcher]:
    """Return the launchers that may have started a process, the innermost first."""
    return [launcher for launcher in LAUNCHERS.values() if launcher is not SINGLE]


def _allocations() -> list[Allocation]:
    return [launcher.allocation for launcher in _asked() if launcher.allocation is not None]


def _search(environ: Environ) -> Detection:
    environ = dict(environ)
    for launcher in _asked():
        environment = launcher.read(environ)
        if environment is not None:
            return _found(*_behind_imitated(launcher, environment, environ), environ)
    _check_complete(environ)
    for allocation in _allocations():
        environment = _task_without_step(allocation, environ)
        if environment is not None:
            place, step = _place(allocation, environ), _spelled(_missing(LAUNCHERS[allocation.name], environ))
            warnings = (
                f"{place} are believed, although {step} are not set: what started this process does not hand on all "
                f"variables of {allocation.title}. To run one process, set {METHOD}={SINGLE.name}.",
                *_size_warnings(LAUNCHERS[allocation.name], environ),
            )
            return Detection(environment, warnings, (_chosen(allocation, environment, environ), *warnings))
    warnings = tuple(_allocation_warnings(environ))
    passed_over = (_passed_over(launcher, environ) for launcher in _asked())
    explanation = (f"{SINGLE.name} was chosen: no launcher speaks.", *warnings, *passed_over)
    return Detection(LaunchEnvironment.lone(), warnings, explanation)


def _found(launcher: Launcher, environment: LaunchEnvironment, environ: Environ) -> Detection:
    """Return what the first launcher that spoke says, unless bare variables overrule it."""
    chosen, overruled = _settle_contradiction(launcher, environment, environ)
    if chosen is BARE:
        environment = BARE.read(environ) or environment
    warnings = (
        *(overruled or _size_warnings(chosen, environ)),
        *_lone_warnings(chosen, environment, environ),
    )
    explanation = (
        _chosen(chosen, environment, environ),
        *(f"{launcher.name} was passed over: {warning}" for warning in overruled),
        *(_passed_over(other, environ, chosen) for other in _asked() if other not in (launcher, chosen)),
    )
    return Detection(environment, warnings, explanation)


def _believe(method: str, source: str, environ: Environ) -> Detection:
    if not isinstance(method, str):
        raise TypeError(f"method must be the name of a launcher, got {method!r} from {source}. Pass 'slurm', say.")
    name = method.strip().lower()
    asked = f"{method} was asked for by {source}."
    if name == SINGLE.name:
        return Detection(LaunchEnvironment.lone(), (), (f"{name} was chosen: one process.", asked))
    launchers = [
        launcher
        for launcher in _asked()
        if launcher.name == name or (launcher.family in _FAMILIES and launcher.family.value == name)
    ]
    if not launchers:
        valid = ", ".join(sorted({*LAUNCHERS, *(family.value for family in _FAMILIES)}))
        raise ValueError(f"method must be one of {valid} (any case), got {method!r} from {source}. Correct the name.")
    allocations = [one for one in _allocations() if one.tells_place and LAUNCHERS[one.name] in launchers]
    candidates: list[Launcher | Allocation] = [*launchers, *allocations]
    for candidate in candidates:
        environment = candidate.read(environ)
        if environment is not None:
            return Detection(environment, (), (_chosen(candidate, environment, environ), asked))
    reasons = "; ".join(f"{candidate.name}: {_why_silent(candidate, environ)}" for candidate in candidates)
    raise LaunchEnvironmentError(
        f"method must name the launcher that started this process, got {method!r} from {source} ({reasons}). "
        "Start the script with that launcher, or unset the method to let distman find the launcher."
    )


def _behind_imitated(
    imitated: Launcher, environment: LaunchEnvironment, environ: Environ
) -> tuple[Launcher, LaunchEnvironment]:
    """Return the launcher that set the variables of one that others imitate: those others say more themselves."""
    for launcher in (LAUNCHERS[name] for name in imitated.imitated_by):
        other = launcher.read(environ)
        if other is not None and (other.rank, other.world_size) == (environment.rank, environment.world_size):
            return launcher, other
    return imitated, environment


def _settle_contradiction(
    launcher: Launcher, environment: LaunchEnvironment, environ: Environ
) -> tuple[Launcher, tuple[str, ...]]:
    """Return which launcher is right where complete bare variables stand beside a launcher's own."""
    if launcher.family is Family.ENV or not is_complete(environ):
        return launcher, ()
    other = BARE.read(environ)
    if other is None or (other.rank, other.world_size) == (environment.rank, environment.world_size):
        return launcher, ()
    both = f"{_place(BARE, environ)}, but {launcher.name} says {_place(launcher, environ)}"
    if launcher.family is Family.MPI:
        raise LaunchEnvironmentError(
            f"RANK and WORLD_SIZE must agree with the MPI that started this process, got {both}. Unset RANK, "
            f"LOCAL_RANK and WORLD_SIZE, or choose: {METHOD}={BARE.name} or {METHOD}={launcher.name}."
        )
    if other.world_size == 1:
        raise LaunchEnvironmentError(
            f"WORLD_SIZE must not be 1 in a task of several, got {both}: each task would be a job of its own. Unset "
            f"RANK, LOCAL_RANK and WORLD_SIZE, or choose: {METHOD}={launcher.name} or {METHOD}={BARE.name}."
        )
    return BARE, (
        f"RANK, LOCAL_RANK and WORLD_SIZE are believed: {both}; a launcher inside the {launcher.name} step must "
        f"have set them. To believe {launcher.name}, set {METHOD}={launcher.name}.",
    )


def _size_warnings(chosen: Launcher, environ: Environ) -> Iterator[str]:
    """Tell a rank that ``WORLD_SIZE`` is not the number of tasks that a scheduler says beside it.

    Where ``WORLD_SIZE`` is believed it may be a multiple: a launcher in each task started several ranks.
    """
    size = read_text(environ, *BARE.fields["world_size"]) or ""
    for allocation in _allocations():
        if not allocation.tells_place or chosen.name not in (allocation.name, BARE.name):
            continue
        num_tasks = read_text(environ, *allocation.fields["world_size"]) or ""
        if not (size.isdecimal() and num_tasks.isdecimal()) or int(num_tasks) == int(size):
            continue
        if chosen is not BARE or (int(num_tasks) > 1 and int(size) % int(num_tasks)):
            tasks = source_of("world_size", allocation.fields, environ)
            yield (
                f"WORLD_SIZE={size} and {tasks} contradict each other: {chosen.name} is believed. Unset WORLD_SIZE, or "
                f"start as many ranks as it says; to choose, set {METHOD}={allocation.name} or {METHOD}={BARE.name}."
            )


def _lone_warnings(chosen: Launcher, environment: LaunchEnvironment, environ: Environ) -> Iterator[str]:
    """Tell the one rank of a launcher that an outer one has started more of them."""
    if environment.world_size > 1 or chosen.family is not Family.ENV:
        return
    outer = [other.launcher for other in spoken(environ) if other.world_size > 1 and other.launcher != chosen.name]
    for name in outer[:1]:
        yield (
            f"This is the only rank of its job: {name} says {_place(LAUNCHERS[name], environ)}, but {chosen.name} says "
            f"{_place(chosen, environ)}, so there are several jobs of one rank. To make them one, start the ranks by "
            f"{name} alone, or tell each {chosen.name} of the others."
        )


def _task_without_step(allocation: Allocation, environ: Environ) -> LaunchEnvironment | None:
    """Return the place of a task whose step is not told, as where a container hands on only some variables.

    Whatever else runs in an allocation knows its job, and is task 0 or none. A task other than 0 that knows its job but
    not its step is an error: task 0 would run alone.
    """
    job_variables = allocation.fields.get("job_id", ())
    environment = None
    if allocation.tells_place and job_variables:
        with contextlib.suppress(LaunchEnvironmentError):  # left over from elsewhere: nobody asked for them
            environment = allocation.read(environ)
    if environment is None or environment.world_size == 1:
        return None
    if read_text(environ, *job_variables) is None:
        return environment
    if environment.rank == 0:
        return None
    raise LaunchEnvironmentError(
        f"{_spelled(_missing(LAUNCHERS[allocation.name], environ))} must be set in a task of {allocation.command}, got "
        f"{_place(allocation, environ)} alone. Hand on all variables of {allocation.title}, or choose: "
        f"{METHOD}={allocation.name} or {METHOD}={SINGLE.name}."
    )


def _allocation_warnings(environ: Environ) -> Iterator[str]:
    """Tell a process of an allocation of several tasks or nodes that it is alone in it."""
    for allocation in _allocations():
        job_id = read_text(environ, *allocation.fields.get("job_id", ()))
        if job_id is None:
            continue
        counts = {
            noun: read_number(environ, *allocation.fields.get(field, ()), least=1)
            for field, noun in (("world_size", "task"), ("num_nodes", "node"))
        }
        if max(count or 1 for count in counts.values()) > 1:
            size = " on ".join(f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items() if count)
            yield (
                f"This is one process: it runs in {allocation.title} allocation {job_id} ({size}), but "
                f"{allocation.command} did not start it. To use the whole allocation, start it with: "
                f"{allocation.command} python ..."
            )


def _chosen(candidate: Launcher | Allocation, environment: LaunchEnvironment, environ: Environ) -> str:
    known = [
        f"{name} {value} ({source_of(name, candidate.fields, environ)})"
        for name in FIELD_NAMES
        if (value := getattr(environment, name)) is not None
    ]
    return f"{candidate.name} was chosen: {', '.join(known)}."


def _check_complete(environ: Environ) -> None:
    """Refuse a rank without a world size: half an environment is not one process by another name."""
    for launcher in _asked():
        rank, world_size = (" or ".join(launcher.fields[field]) for field in ("rank", "world_size"))
        is_half = _missing(launcher, environ) == [launcher.fields["world_size"]]
        if is_half and launcher.why_not(environ) is None:
            raise LaunchEnvironmentError(
                f"{world_size} must be set where {rank} is, got {source_of('rank', launcher.fields, environ)} and no "
                f"{world_size} from the environment. Set it to the number of processes, or unset {rank} to run one "
                "process."
            )


def _passed_over(launcher: Launcher, environ: Environ, chosen: Launcher = SINGLE) -> str:
    reason = _why_silent(launcher, environ) or f"{chosen.name} comes first ({_place(launcher, environ)})"
    return f"{launcher.name} was passed over: {reason}."


def _why_silent(candidate: Launcher | Allocation, environ: Environ) -> str | None:
    """Return why this launcher did not start this process, or None where its variables say that it did."""
    missing = _missing(candidate, environ)
    if missing:
        return f"{_spelled(missing, ', ')} {'is' if len(missing) == 1 else 'are'} not set"
    return candidate.why_not(environ)


def _missing(candidate: Launcher | Allocation, environ: Environ) -> list[tuple[str, ...]]:
    """Return the variables, each with its spellings, for want of which a launcher is not believed."""
    required = (*candidate.marks, candidate.fields["rank"], candidate.fields["world_size"])
    return [names for names in required if read_text(environ, *names) is None]


def _spelled(variables: Iterable[Iterable[str]], conjunction: str = " and ") -> str:
    return conjunction.join(map(" or ".join, variables))


def _place(launcher: Launcher | Allocation, environ: Environ) -> str:
    return " and ".join(str(source_of(field, launcher.fields, environ)) for field in ("rank", "world_size"))
