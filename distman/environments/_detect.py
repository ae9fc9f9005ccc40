"""Which launcher started this process: the choice, and its explanation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from distman.environments._bare import BARE, is_complete
from distman.environments._base import LaunchEnvironment, read_count, read_text
from distman.environments._distman_run import DISTMAN_RUN
from distman.environments._fields import FIELD_NAMES, source_of
from distman.environments._flux import FLUX
from distman.environments._hydra import HYDRA
from distman.environments._jsrun import JSRUN
from distman.environments._launcher import Allocation, Family, Launcher
from distman.environments._mvapich import MVAPICH
from distman.environments._openmpi import OPENMPI
from distman.environments._pals import PALS
from distman.environments._registry import LAUNCHERS
from distman.environments._single import SINGLE
from distman.environments._slurm import SLURM
from distman.environments._submitit import SUBMITIT
from distman.environments._torchrun import TORCHRUN
from distman.errors import LaunchEnvironmentError

METHOD = "DISTMAN_INITIALIZATION_METHOD"
"""The variable that names the launcher to believe."""

_FAMILIES = (Family.ENV, Family.MPI)
"""Families whose name is a method too."""

# Innermost first: mpirun inside a Slurm job hands its ranks Slurm's variables too.
LAUNCHERS.define(TORCHRUN, DISTMAN_RUN, OPENMPI, HYDRA, MVAPICH, PALS, SUBMITIT, JSRUN, FLUX, SLURM, BARE, SINGLE)


@dataclasses.dataclass(frozen=True)
class Detection:
    """What was chosen, and why.

    Attributes:
        environment: What the chosen launcher says.
        warnings: Sentences that a user should see without asking.
        reasons: Gives the explanation; called once, when somebody asks for it.

    Example:
        >>> detection = detect({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "3"})
        >>> detection.environment.rank, detection.warnings
        (1, ())
        >>> print(detection.explanation[0])
        env was chosen: rank 1 (RANK=1), world_size 2 (WORLD_SIZE=2)...
    """

    environment: LaunchEnvironment
    warnings: tuple[str, ...]
    reasons: Callable[[], tuple[str, ...]] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def explanation(self) -> tuple[str, ...]:
        """Sentences: what was chosen, from which variables, what was passed over and why."""
        return self.reasons()

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


def spoken(environ: Mapping[str, str]) -> list[LaunchEnvironment]:
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


def _asked() -> list[Launcher]:
    """Return the launchers that may have started a process, the innermost first."""
    return [launcher for launcher in LAUNCHERS.values() if launcher is not SINGLE]


def _search(environ: Mapping[str, str]) -> Detection:
    environ = dict(environ)
    for launcher in _asked():
        environment = launcher.read(environ)
        if environment is not None:
            launcher, environment = _behind_imitated(launcher, environment, environ)
            chosen, warnings = _settle_contradiction(launcher, environment, environ)
            if chosen is BARE:
                environment = BARE.read(environ) or environment
            warnings = warnings or tuple(_size_warnings(chosen, environ))
            warnings = (*warnings, *_lone_warnings(chosen, environment, environ))
            explain_choice = functools.partial(_explain_search, launcher, chosen, environment, environ, warnings)
            return Detection(environment, warnings, explain_choice)
    _check_complete(environ)
    for allocation in [launcher.allocation for launcher in _asked()]:
        environment = None if allocation is None else _task_without_step(allocation, environ)
        if allocation is not None and environment is not None:
            size_warnings = _size_warnings(LAUNCHERS[allocation.name], environ)
            warnings = (_believed_without_step(allocation, environ), *size_warnings)
            sentences = (_chosen(allocation, environment, environ), *warnings)
            return Detection(environment, warnings, functools.partial(tuple, sentences))
    warnings = tuple(_allocation_warnings(environ))
    return Detection(LaunchEnvironment.lone(), warnings, functools.partial(_explain_single, environ, warnings))


def _explain_search(
    first: Launcher,
    chosen: Launcher,
    environment: LaunchEnvironment,
    environ: Mapping[str, str],
    warnings: tuple[str, ...],
) -> tuple[str, ...]:
    """Explain the choice; ``first`` is the first launcher that spoke, which bare variables may overrule."""
    others = [launcher for launcher in _asked() if launcher not in (first, chosen)]
    overruled = [f"{first.name} was passed over: {warnings[0]}"] if first is not chosen else []
    return (
        _chosen(chosen, environment, environ),
        *overruled,
        *(_passed_over(launcher, environ, chosen.name) for launcher in others),
    )


def _explain_single(environ: Mapping[str, str], warnings: tuple[str, ...]) -> tuple[str, ...]:
    passed_over = (_passed_over(launcher, environ, None) for launcher in _asked())
    return (f"{SINGLE.name} was chosen: no launcher speaks.", *warnings, *passed_over)


def _believe(method: str, source: str, environ: Mapping[str, str]) -> Detection:
    if not isinstance(method, str):
        raise TypeError(f"method must be the name of a launcher, got {method!r} from {source}. Pass 'slurm', say.")
    name = method.strip().lower()
    asked = f"{method} was asked for by {source}."
    if name == SINGLE.name:
        return Detection(LaunchEnvironment.lone(), (), lambda: (f"{name} was chosen: one process.", asked))
    candidates = _named(name)
    if not candidates:
        valid = ", ".join(sorted({*LAUNCHERS, *(family.value for family in _FAMILIES)}))
        raise ValueError(f"method must be one of {valid} (any case), got {method!r} from {source}. Correct the name.")
    for candidate in candidates:
        environment = candidate.read(environ)
        if environment is not None:
            sentences = (_chosen(candidate, environment, environ), asked)
            return Detection(environment, (), functools.partial(tuple, sentences))
    reasons = "; ".join(f"{candidate.name}: {_why_silent(candidate, environ)}" for candidate in candidates)
    raise LaunchEnvironmentError(
        f"method must name the launcher that started this process, got {method!r} from {source} ({reasons}). "
        "Start the script with that launcher, or unset the method to let distman find the launcher."
    )


def _named(method: str) -> list[Launcher | Allocation]:
    """Return what may be believed where the user asks for a launcher or a family by name, the first choice first."""
    launchers = [
        launcher
        for launcher in _asked()
        if launcher.name == method or (launcher.family in _FAMILIES and launcher.family.value == method)
    ]
    allocations = [launcher.allocation for launcher in launchers if launcher.allocation is not None]
    return [*launchers, *(allocation for allocation in allocations if allocation.tells_place)]


def _behind_imitated(
    imitated: Launcher, environment: LaunchEnvironment, environ: Mapping[str, str]
) -> tuple[Launcher, LaunchEnvironment]:
    """Return who set the variables of a launcher that others imitate: those others say more themselves."""
    for launcher in (LAUNCHERS[name] for name in imitated.imitated_by):
        other = launcher.read(environ)
        if other is not None and (other.rank, other.world_size) == (environment.rank, environment.world_size):
            return launcher, other
    return imitated, environment


def _settle_contradiction(
    launcher: Launcher, environment: LaunchEnvironment, environ: Mapping[str, str]
) -> tuple[Launcher, tuple[str, ...]]:
    """Return who is right where complete bare variables stand beside a launcher's own."""
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


def _size_warnings(chosen: Launcher, environ: Mapping[str, str]) -> Iterator[str]:
    """Tell a rank that ``WORLD_SIZE`` is not the number of tasks that a scheduler says beside it.

    Where ``WORLD_SIZE`` is believed it may be a multiple: a launcher in each task started several ranks.
    """
    size = read_text(environ, *BARE.fields["world_size"])
    for allocation in [launcher.allocation for launcher in _asked()]:
        if allocation is None or not allocation.tells_place or chosen.name not in (allocation.name, BARE.name):
            continue
        num_tasks = read_text(environ, *allocation.fields["world_size"])
        if not (size and size.isdecimal() and num_tasks and num_tasks.isdecimal()) or int(num_tasks) == int(size):
            continue
        if chosen is not BARE or (int(num_tasks) > 1 and int(size) % int(num_tasks)):
            tasks = source_of("world_size", allocation.fields, environ)
            yield (
                f"WORLD_SIZE={size} and {tasks} contradict each other: {chosen.name} is believed. Unset WORLD_SIZE, or "
                f"start as many ranks as it says; to choose, set {METHOD}={allocation.name} or {METHOD}={BARE.name}."
            )


def _lone_warnings(chosen: Launcher, environment: LaunchEnvironment, environ: Mapping[str, str]) -> Iterator[str]:
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


def _task_without_step(allocation: Allocation, environ: Mapping[str, str]) -> LaunchEnvironment | None:
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
        f"{_missing_step(allocation, environ)} must be set in a task of {allocation.command}, got "
        f"{_place(allocation, environ)} alone. Hand on all variables of {allocation.title}, or choose: "
        f"{METHOD}={allocation.name} or {METHOD}={SINGLE.name}."
    )


def _believed_without_step(allocation: Allocation, environ: Mapping[str, str]) -> str:
    return (
        f"{_place(allocation, environ)} are believed, although {_missing_step(allocation, environ)} are not set: what "
        f"started this process does not hand on all variables of {allocation.title}. To run one process, set "
        f"{METHOD}={SINGLE.name}."
    )


def _missing_step(allocation: Allocation, environ: Mapping[str, str]) -> str:
    return " and ".join(_spelled(names) for names in LAUNCHERS[allocation.name].missing(environ))


def _allocation_warnings(environ: Mapping[str, str]) -> Iterator[str]:
    """Tell a process of an allocation of several tasks or nodes that it is alone in it."""
    for allocation in (launcher.allocation for launcher in _asked()):
        job_id = None if allocation is None else read_text(environ, *allocation.fields.get("job_id", ()))
        if allocation is None or job_id is None:
            continue
        num_tasks = read_count(environ, *allocation.fields.get("world_size", ()))
        num_nodes = read_count(environ, *allocation.fields.get("num_nodes", ()))
        if max(num_tasks or 1, num_nodes or 1) > 1:
            size = [_counted(count, noun) for count, noun in ((num_tasks, "task"), (num_nodes, "node")) if count]
            yield (
                f"This is one process: it runs in {allocation.title} allocation "
                f"{job_id} ({' on '.join(size)}), but {allocation.command} did not start it. To use the whole "
                f"allocation, start it with: {allocation.command} python ..."
            )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _chosen(candidate: Launcher | Allocation, environment: LaunchEnvironment, environ: Mapping[str, str]) -> str:
    values = {name: getattr(environment, name) for name in FIELD_NAMES}
    known = [
        f"{name} {value} ({source_of(name, candidate.fields, environ)})"
        for name, value in values.items()
        if value is not None
    ]
    return f"{candidate.name} was chosen: {', '.join(known)}."


def _check_complete(environ: Mapping[str, str]) -> None:
    """Refuse a rank without a world size: half an environment is not one process by another name."""
    for launcher in _asked():
        rank, world_size = (_spelled(launcher.fields[field]) for field in ("rank", "world_size"))
        is_half = launcher.missing(environ) == [launcher.fields["world_size"]]
        if is_half and launcher.denial(environ) is None:
            raise LaunchEnvironmentError(
                f"{world_size} must be set where {rank} is, got {source_of('rank', launcher.fields, environ)} and no "
                f"{world_size} from the environment. Set it to the number of processes, or unset {rank} to run one "
                "process."
            )


def _passed_over(launcher: Launcher, environ: Mapping[str, str], chosen: str | None) -> str:
    reason = _why_silent(launcher, environ) or f"{chosen} comes first ({_place(launcher, environ)})"
    return f"{launcher.name} was passed over: {reason}."


def _why_silent(candidate: Launcher | Allocation, environ: Mapping[str, str]) -> str | None:
    """Return why this launcher did not start this process, or None where its variables say that it did."""
    missing = [_spelled(names) for names in candidate.missing(environ)]
    if missing:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
    return candidate.denial(environ)


def _spelled(names: Iterable[str]) -> str:
    return " or ".join(names)


def _place(launcher: Launcher | Allocation, environ: Mapping[str, str]) -> str:
    return " and ".join(str(source_of(field, launcher.fields, environ)) for field in ("rank", "world_size"))
