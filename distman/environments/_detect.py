"""Which launcher started this process: the choice, and its explanation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping

from distman.environments import _bare, _flux, _hydra, _jsrun, _mvapich, _openmpi, _pals, _slurm, _torchrun
from distman.environments._base import LAUNCHERS, LaunchEnvironment, read_count, read_text
from distman.environments._fields import Fields, source_of
from distman.errors import LaunchEnvironmentError

METHOD = "DISTMAN_INITIALIZATION_METHOD"
"""The variable that names the launcher to believe."""

_MPI = ("openmpi", "hydra", "mvapich", "pals")
_SINGLE = LaunchEnvironment("single", rank=0, world_size=1)


@dataclasses.dataclass(frozen=True)
class _Launcher:
    name: str
    fields: Fields
    read: Callable[[Mapping[str, str]], LaunchEnvironment | None]


_ORDER = (
    _Launcher("torchrun", _torchrun.FIELDS, _torchrun.from_torchrun),
    _Launcher("openmpi", _openmpi.FIELDS, _openmpi.from_openmpi),
    _Launcher("hydra", _hydra.FIELDS, _hydra.from_hydra),
    _Launcher("mvapich", _mvapich.FIELDS, _mvapich.from_mvapich),
    _Launcher("pals", _pals.FIELDS, _pals.from_pals),
    _Launcher("jsrun", _jsrun.FIELDS, _jsrun.from_jsrun),
    _Launcher("flux", _flux.FIELDS, _flux.from_flux),
    _Launcher("slurm", _slurm.FIELDS, _slurm.from_slurm),
    _Launcher("env", _bare.FIELDS, _bare.from_bare),
)
"""Innermost first: mpirun inside a Slurm job hands its ranks Slurm's variables too."""

_ALLOCATION = _Launcher("slurm", _slurm.ALLOCATION_FIELDS, _slurm.from_slurm_allocation)
_BARE = _ORDER[-1]
_BY_NAME = {launcher.name: launcher for launcher in _ORDER}

_METHODS: Mapping[str, tuple[_Launcher, ...]] = {
    **{launcher.name: (launcher,) for launcher in _ORDER},
    "env": (_BY_NAME["torchrun"], _BARE),
    "mpi": tuple(_BY_NAME[name] for name in _MPI),
    "slurm": (_BY_NAME["slurm"], _ALLOCATION),
    "single": (),
}


@dataclasses.dataclass(frozen=True)
class Detection:
    """What was chosen, and why.

    Attributes:
        environment: What the chosen launcher says.
        warnings: Sentences that a user should see without asking.
        reasons: Gives the explanation; called once, when somebody asks for it.
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
        if self.environment.launcher == "single":
            raise LaunchEnvironmentError(
                "use_distributed must be None or False where no launcher started this process, got True. "
                "Start the script with torchrun, mpirun or srun.\n" + "\n".join(self.explanation)
            )


def detect(environ: Mapping[str, str], method: str | None = None) -> Detection:
    """Find out which launcher started this process, and what it says.

    Local. Pure: nothing is read but ``environ``.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.
        method: Name of the launcher to believe, any case; also ``"mpi"`` for any MPI. None asks the variable
            ``DISTMAN_INITIALIZATION_METHOD``, then all launchers, the innermost first.

    Raises:
        LaunchEnvironmentError: Variables are missing, not numbers, or contradict each other; the method finds
            nothing.
        ValueError: There is no such method.
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
    """
    return "\n".join(detect(os.environ if environ is None else environ, method).explanation)


def spoken(environ: Mapping[str, str]) -> list[LaunchEnvironment]:
    """Return what each launcher says whose variables are here and have a meaning, the innermost first.

    Bare variables count where they are complete.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.
    """
    found = []
    for launcher in _ORDER:
        if launcher is not _BARE or _bare.is_complete(environ):
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
    """
    return detect(os.environ if environ is None else environ).environment.launcher != "single"


def should_use_distributed(use_distributed: bool | None, environ: Mapping[str, str] | None = None) -> bool:  # noqa: FBT001 - the one argument is the question
    """Return whether a program with this wish should start a process group here.

    Local.

    Args:
        use_distributed: True insists on it; False rules it out; None wants it where there are several ranks.
        environ: Environment variables; None reads ``os.environ``.

    Raises:
        LaunchEnvironmentError: It is insisted on where no launcher speaks; or see :func:`detect`.
    """
    if use_distributed is False:
        return False
    detection = detect(os.environ if environ is None else environ)
    if use_distributed:
        detection.require_launcher()
    return use_distributed or detection.environment.world_size > 1


def _search(environ: Mapping[str, str]) -> Detection:
    environ = dict(environ)
    for launcher in _ORDER:
        environment = launcher.read(environ)
        if environment is not None:
            if launcher.name == "pals":
                launcher, environment = _behind_pals(launcher, environment, environ)
            chosen, warnings = _settle_contradiction(launcher, environment, environ)
            if chosen is _BARE:
                environment = _bare.from_bare(environ) or environment
            explain_choice = functools.partial(_explain_search, launcher, chosen, environment, environ, warnings)
            return Detection(environment, warnings, explain_choice)
    _check_whole(environ)
    warnings = _allocation_warnings(environ)
    return Detection(_SINGLE, warnings, functools.partial(_explain_single, environ, warnings))


def _explain_search(
    first: _Launcher,
    chosen: _Launcher,
    environment: LaunchEnvironment,
    environ: Mapping[str, str],
    warnings: tuple[str, ...],
) -> tuple[str, ...]:
    """Explain the choice; ``first`` is the first launcher that spoke, which bare variables may overrule."""
    others = [launcher for launcher in _ORDER if launcher not in (first, chosen)]
    overruled = [f"{first.name} was passed over: {warnings[0]}"] if first is not chosen else []
    return (
        _chosen(chosen, environment, environ),
        *overruled,
        *(_passed_over(launcher, environ, chosen.name) for launcher in others),
    )


def _explain_single(environ: Mapping[str, str], warnings: tuple[str, ...]) -> tuple[str, ...]:
    passed_over = (_passed_over(launcher, environ, None) for launcher in _ORDER)
    return ("single was chosen: no launcher speaks.", *warnings, *passed_over)


def _believe(method: str, source: str, environ: Mapping[str, str]) -> Detection:
    launchers = _METHODS.get(method.strip().lower())
    if launchers is None:
        valid = ", ".join(sorted({*LAUNCHERS, "mpi"}))
        raise ValueError(f"method must be one of {valid} (any case), got {method!r} from {source}. Correct it.")
    asked = f"{method} was asked for by {source}."
    if not launchers:
        return Detection(_SINGLE, (), lambda: ("single was chosen: one process.", asked))
    for launcher in launchers:
        environment = launcher.read(environ)
        if environment is not None:
            sentences = (_chosen(launcher, environment, environ), asked)
            return Detection(environment, (), functools.partial(tuple, sentences))
    reasons = "; ".join(f"{launcher.name}: {_are_not_set(_missing(launcher, environ))}" for launcher in launchers)
    raise LaunchEnvironmentError(
        f"method must name the launcher that started this process, got {method!r} from {source} ({reasons}). "
        "Start the script with that launcher, or let the launcher be found out: unset the method."
    )


def _behind_pals(
    pals_itself: _Launcher, environment: LaunchEnvironment, environ: Mapping[str, str]
) -> tuple[_Launcher, LaunchEnvironment]:
    """Return who set the variables of PALS: Slurm and Flux do, for Cray's MPI to find, and say more themselves."""
    for launcher in (_BY_NAME["flux"], _BY_NAME["slurm"]):
        other = launcher.read(environ)
        if other is not None and (other.rank, other.world_size) == (environment.rank, environment.world_size):
            return launcher, other
    return pals_itself, environment


def _settle_contradiction(
    launcher: _Launcher, environment: LaunchEnvironment, environ: Mapping[str, str]
) -> tuple[_Launcher, tuple[str, ...]]:
    """Return who is right where complete bare variables stand beside a launcher's own."""
    if launcher.name in ("torchrun", "env") or not _bare.is_complete(environ):
        return launcher, ()
    other = _bare.from_bare(environ)
    if other is None or (other.rank, other.world_size) == (environment.rank, environment.world_size):
        return launcher, ()
    both = f"{_place(_BARE, environ)}, but {launcher.name} says {_place(launcher, environ)}"
    if launcher.name in _MPI:
        raise LaunchEnvironmentError(
            f"RANK and WORLD_SIZE must agree with the MPI that started this process, got {both}. Unset RANK, "
            f"LOCAL_RANK and WORLD_SIZE, or choose: {METHOD}=env or {METHOD}={launcher.name}."
        )
    return _BARE, (
        f"RANK, LOCAL_RANK and WORLD_SIZE are believed: {both}; a launcher inside the {launcher.name} step must "
        f"have set them. To believe {launcher.name}, set {METHOD}={launcher.name}.",
    )


def _allocation_warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    if not _slurm.is_allocation(environ):
        return ()
    num_tasks = read_count(environ, *_slurm.ALLOCATION_FIELDS["world_size"])
    num_nodes = read_count(environ, *_slurm.ALLOCATION_FIELDS["num_nodes"])
    if max(num_tasks or 1, num_nodes or 1) == 1:
        return ()
    size = [_counted(count, noun) for count, noun in ((num_tasks, "task"), (num_nodes, "node")) if count]
    return (
        f"This is one process: it runs in Slurm allocation {read_text(environ, 'SLURM_JOB_ID', 'SLURM_JOBID')} "
        f"({' on '.join(size)}), but srun did not start it. To use the whole allocation, "
        "start it with: srun python ...",
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _chosen(launcher: _Launcher, environment: LaunchEnvironment, environ: Mapping[str, str]) -> str:
    values = {**dataclasses.asdict(environment)}
    known = [
        f"{field} {values[field]} ({source_of(field, launcher.fields, environ)})"
        for field in launcher.fields
        if values[field] is not None
    ]
    return f"{launcher.name} was chosen: {', '.join(known)}."


def _check_whole(environ: Mapping[str, str]) -> None:
    """Refuse a rank without a world size: half an environment is not one process by another name."""
    for launcher in _ORDER:
        *_, rank, world_size = _key_variables(launcher)
        if launcher.name == "slurm" and not _slurm.is_step(environ):
            continue
        if _missing(launcher, environ) == [world_size]:
            raise LaunchEnvironmentError(
                f"{world_size} must be set where {rank} is, got {source_of('rank', launcher.fields, environ)} and no "
                f"{world_size} from the environment. Set it to the number of processes, or unset {rank} to run one "
                "process."
            )


def _passed_over(launcher: _Launcher, environ: Mapping[str, str], chosen: str | None) -> str:
    missing = _missing(launcher, environ)
    if missing:
        return f"{launcher.name} was passed over: {_are_not_set(missing)}."
    if launcher.name == "slurm" and not _slurm.is_step(environ):
        return "slurm was passed over: the step is Slurm's own (the shell of salloc, a batch script), not srun's."
    return f"{launcher.name} was passed over: {chosen} comes first ({_place(launcher, environ)})."


def _missing(launcher: _Launcher, environ: Mapping[str, str]) -> list[str]:
    return [name for name in _key_variables(launcher) if read_text(environ, *name.split(" or ")) is None]


def _key_variables(launcher: _Launcher) -> list[str]:
    """Return the variables without which the launcher did not start this process, rank and world size last."""
    keys = [" or ".join(launcher.fields[field]) for field in ("rank", "world_size")]
    extra = {
        "torchrun": [_torchrun.MARK],
        "hydra": [*launcher.fields["local_rank"]],
        "slurm": ["SLURM_STEP_ID or SLURM_STEPID"],
    }
    return (extra.get(launcher.name, []) if launcher is not _ALLOCATION else []) + keys


def _place(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    return " and ".join(str(source_of(field, launcher.fields, environ)) for field in ("rank", "world_size"))


def _are_not_set(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{', '.join(listed)} {'is' if len(listed) == 1 else 'are'} not set"
