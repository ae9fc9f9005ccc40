"""The launchers that distman knows, the innermost first, and how a site adds its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from distman.errors import LaunchEnvironmentError

if TYPE_CHECKING:
    from distman.environments._launcher import Launcher

GROUP = "distman.launchers"
"""The entry points of installed packages that are loaded before a launcher is looked for."""

_BARE = "env"
"""The launcher before which others are put unless told: bare variables speak only where no launcher does."""

_RESERVED = ("mpi",)
"""Names that ``method`` understands already, beside those of the launchers."""


class _Launchers(Mapping[str, "Launcher"]):
    """Name -> record, the innermost launcher first; what is registered appears in it at once."""

    def __init__(self) -> None:
        self._records: dict[str, Launcher] = {}
        self._is_discovered = False
        self._broken: LaunchEnvironmentError | None = None

    def __getitem__(self, name: str) -> Launcher:
        if name not in self._records:
            self._discover()
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(self._records)

    def __len__(self) -> int:
        self._discover()
        return len(self._records)

    def define(self, *launchers: Launcher) -> None:
        self._records = {launcher.name: launcher for launcher in launchers}

    def register(self, launcher: Launcher, before: str) -> None:
        name = launcher.name
        if self._records.get(name) == launcher:
            return  # its module is imported by the program, and named by an entry point too
        if name in self._records or name in _RESERVED:
            taken = ", ".join((*self._records, *_RESERVED))
            raise ValueError(f"launcher.name must be none of {taken}, got {name!r}. Choose another name.")
        self._check_known("before", before)
        for other in launcher.imitated_by:
            self._check_known("launcher.imitated_by", other)
        records = list(self._records.items())
        records.insert(list(self._records).index(before), (name, launcher))
        self._records = dict(records)

    def _check_known(self, what: str, name: str) -> None:
        if name not in self._records:
            raise ValueError(f"{what} must name one of {', '.join(self._records)}, got {name!r}. Register that first.")

    def _discover(self) -> None:
        """Load the entry points, once: their modules register launchers when they are imported."""
        if self._broken is not None:
            raise self._broken
        if self._is_discovered:
            return
        self._is_discovered = True  # before the loading: what is loaded may look into this mapping
        from importlib.metadata import entry_points  # here: its import takes longer than that of this package

        for entry_point in entry_points(group=GROUP):
            try:
                entry_point.load()
            except Exception as error:  # whatever a foreign module raises; the user must learn whose module it is
                self._broken = LaunchEnvironmentError(
                    f"Loading the launcher {entry_point.name} = {entry_point.value} (an entry point of {GROUP}) "
                    f"failed: {type(error).__name__}: {error}. Repair or uninstall the package that provides it."
                )
                raise self._broken from error


LAUNCHERS = _Launchers()
"""Name -> :class:`Launcher`, in the order of asking: the innermost first, ``"single"``, which is none, last."""


def register_launcher(launcher: Launcher, *, before: str | None = None) -> None:
    """Make a launcher known that is not one of distman's own.

    Local. To be called before ``initialize()``: from a module that the script imports, or that an installed
    package names as an entry point of the group ``distman.launchers``. The same record again changes nothing.

    Args:
        launcher: The record of the launcher.
        before: Name of the launcher that is asked next, the one inside of which this one runs; None asks it after
            all others, before bare ``RANK`` and ``WORLD_SIZE``.

    Raises:
        ValueError: The name is taken, the record does not say where rank and world size are, or ``before`` names
            no launcher. Nothing is registered then.

    Example:
        >>> fields = {"rank": ("SITE_RANK",), "world_size": ("SITE_SIZE",)}
        >>> behaviour = {"family": Family.STEP, "variables": ("SITE_*",), "on_failure": OnFailure.WAITS}
        >>> register_launcher(Launcher(name="site", fields=fields, **behaviour), before="slurm")
        >>> detect({"SITE_RANK": "3", "SITE_SIZE": "4"}).environment.rank
        3
    """
    for field in ("rank", "world_size"):
        if not launcher.fields.get(field):
            raise ValueError(
                f"launcher.fields must name the variables of rank and world_size, got none of {field} from "
                f"{launcher.name}. Add them."
            )
    LAUNCHERS.register(launcher, _BARE if before is None else before)
