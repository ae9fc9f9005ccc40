"""The launchers that distman knows, the innermost first, and how a site adds its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from distman.errors import LaunchEnvironmentError

if TYPE_CHECKING:
    from distman.environments._launcher import Launcher

GROUP = "distman.launchers"  # the entry points of installed packages that are loaded before a launcher is looked for

_BARE = "env"  # the launcher before which others are put unless told: bare variables speak only where no launcher does
_MPI = "mpi"  # the name that ``method`` understands beside those of the launchers


class _Launchers(Mapping[str, "Launcher"]):
    """Name -> record, the innermost launcher first; what is registered appears in it at once."""

    def __init__(self) -> None:
        self._records: dict[str, Launcher] = {}
        self._is_discovered = False

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

    def put(self, *launchers: Launcher, before: str | None = None) -> None:
        """Enter launchers before another one, or as the last ones."""
        records = list(self._records.items())
        place = len(records) if before is None else list(self._records).index(before)
        records[place:place] = [(launcher.name, launcher) for launcher in launchers]
        self._records = dict(records)

    def _discover(self) -> None:
        """Load the entry points, once: their modules register launchers when they are imported."""
        if self._is_discovered:
            return
        self._is_discovered = True  # before the loading: what is loaded may look into this mapping
        from importlib.metadata import entry_points  # here: its import takes longer than that of this package

        for entry_point in entry_points(group=GROUP):
            try:
                entry_point.load()
            except Exception as error:  # whatever a foreign module raises; the user must learn whose module it is
                self._is_discovered = False
                raise LaunchEnvironmentError(
                    f"Loading the launcher {entry_point.name} = {entry_point.value} (an entry point of {GROUP}) "
                    f"failed: {type(error).__name__}: {error}. Repair or uninstall the package that provides it."
                ) from error


LAUNCHERS = _Launchers()
"""Name -> :class:`Launcher`, in the order of asking: the innermost first, ``"single"``, for no launcher, last."""


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
    before = _BARE if before is None else before
    known = LAUNCHERS._records
    if known.get(launcher.name) == launcher:
        return  # its module is imported by the program, and named by an entry point too
    if launcher.name in (*known, _MPI):
        taken = ", ".join((*known, _MPI))
        raise ValueError(f"launcher.name must be none of {taken}, got {launcher.name!r}. Choose another name.")
    for what, other in (("before", before), *(("launcher.imitated_by", other) for other in launcher.imitated_by)):
        if other not in known:
            raise ValueError(f"{what} must name one of {', '.join(known)}, got {other!r}. Register that first.")
    LAUNCHERS.put(launcher, before=before)
