"""The numbered checkpoints of a run, the last few of which are kept."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from distman._log import logger
from distman._text import printable
from distman.checkpoint import _background as in_background
from distman.checkpoint._all_or_none import on_all_ranks
from distman.checkpoint._location import Location, locate
from distman.checkpoint._single_file import target_device
from distman.checkpoint._state import check_state, copy_to_host, read_state, write_state
from distman.decorators import on_rank
from distman.errors import CheckpointError, RankFailedError

_LATEST = "latest.pt"
_BEST = "best.pt"
_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")


class CheckpointFolder:
    """A folder of numbered checkpoints: ``checkpoint-00000120.pt`` and so on, ``latest.pt`` and ``best.pt``.

    Made alike on every rank; rank 0 alone writes, and says what is there. One job writes into a folder at a time.

    Args:
        path: The folder, or a URL such as ``s3://bucket/run``. It is made by the first save.
        keep: How many checkpoints to keep, those that were saved last; the best one stays besides. None keeps all.
        background: Let a thread write while the program continues.

    Attributes:
        path: The folder: a path, or a URL.

    Raises:
        ValueError: ``keep`` is less than 1, or the scheme of the URL is unknown.
        ImportError: A package is missing that the scheme needs.

    Example:
        >>> folder = CheckpointFolder("run", keep=2)
        >>> for step in (100, 200, 300):
        ...     folder.save({"step": step}, step)
        >>> folder.wait()
        >>> sorted(path.name for path in folder.path.iterdir())
        ['checkpoint-00000200.pt', 'checkpoint-00000300.pt', 'latest.pt']
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | None = 3, background: bool = True) -> None:
        if keep is not None and operator.index(keep) < 1:
            raise ValueError(f"keep must be at least 1, got {keep}. Pass None to keep all checkpoints.")
        self._location = locate(path)
        self.path = self._location.path
        self._keep = keep
        self._is_background = background

    def save(self, state: object, step: int, *, is_best: bool = False, good: Collection[int] = ()) -> None:
        """Save rank 0's state as the checkpoint of a step, then remove those that are not kept.

        Collective. Blocking, as :func:`save` is. A write that is still under way is waited for first.

        Args:
            state: See :func:`save`.
            step: Number of the step, 0 or more.
            is_best: Let ``best.pt`` point to it.
            good: Steps whose checkpoints stay, too, as far as they are there.

        Raises:
            RankFailedError: On every rank: rank 0 could not save it, see :func:`save`; or the previous save in the
                background failed, and nothing was saved this time.

        Example:
            >>> folder = CheckpointFolder("run", keep=1)
            >>> for step, loss in enumerate([0.5, 0.2, 0.4]):
            ...     folder.save({"loss": loss}, step, is_best=loss == 0.2)
            >>> folder.best().name, folder.latest().name
            ('checkpoint-00000001.pt', 'checkpoint-00000002.pt')
        """
        on_rank(0)(self._save)(state, step, is_best=is_best, good=good)

    def wait(self) -> None:
        """Return when all that was saved is complete and on the disk.

        Collective. Blocking.

        Raises:
            RankFailedError: On every rank: the last checkpoint could not be written. The cause, on rank 0, says why.
        """
        on_rank(0)(in_background.wait)(self._location)

    def latest(self) -> Path | str | None:
        """Return the path of the checkpoint that was saved last, or None; the same on all ranks.

        Collective. Blocking. A write that is under way is waited for.
        """
        return self._path(on_rank(0, broadcast=True)(self._latest)())

    def best(self) -> Path | str | None:
        """Return the path of the best checkpoint, or None; the same on all ranks.

        Collective. Blocking. A write that is under way is waited for.
        """
        return self._path(on_rank(0, broadcast=True)(self._best)())

    def load_latest(self, *, device: str | torch.device | None = None) -> Any:
        """Return the state that was saved last, on every rank, or None if there is none.

        Collective. Blocking.

        A damaged one is skipped with a warning, as long as there is an older one.

        Args:
            device: See :func:`load`.

        Raises:
            CheckpointError: On a rank where all of them are damaged.
            RankFailedError: On the other ranks; and on all, if a file cannot be read on one for another reason.

        Example:
            >>> folder = CheckpointFolder("run")
            >>> state = folder.load_latest() or {"step": 0}  # of the run before, if there was one
            >>> folder.save({"step": state["step"] + 100}, state["step"] + 100)
            >>> folder.load_latest()
            {'step': 100}
        """
        names = on_rank(0, broadcast=True)(self._names_newest_first)() or []
        for name in names[:-1]:
            try:
                return self._load(name, device)
            except (CheckpointError, RankFailedError) as error:
                if isinstance(error, RankFailedError) and error.error_type != CheckpointError.__name__:
                    raise
                on_rank(0)(_warn)(self._location / name, error)
        return self._load(names[-1], device) if names else None

    def load_best(self, *, device: str | torch.device | None = None) -> Any:
        """Return the best state, on every rank, or None if there is none.

        Collective. Blocking.

        Args:
            device: See :func:`load`.

        Raises:
            CheckpointError: On a rank where it is damaged.
            RankFailedError: On the other ranks.

        Example:
            >>> folder = CheckpointFolder("run")
            >>> folder.save({"weight": torch.ones(2)}, 7, is_best=True)
            >>> folder.load_best(device="cpu")
            {'weight': tensor([1., 1.])}
        """
        name = on_rank(0, broadcast=True)(self._best)()
        return None if name is None else self._load(name, device)

    def _save(self, state: object, step: int, *, is_best: bool, good: Collection[int]) -> None:
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"step must be 0 or more, got {step}. Count the steps from 0.")
        in_background.refuse_after_failure(self._location)
        check_state(state)
        kept = copy_to_host(state) if self._is_background else state
        stays = frozenset(map(_name, good))
        work = functools.partial(_write, self._location, kept, number, is_best=is_best, keep=self._keep, stays=stays)
        if self._is_background:
            in_background.start(self._location, work)
        else:
            work()

    def _path(self, name: str | None) -> Path | str | None:
        return None if name is None else (self._location / name).path

    def _latest(self) -> str | None:
        in_background.join(self._location)
        return _latest(_complete(self._location), _linked(self._location, _LATEST))

    def _best(self) -> str | None:
        in_background.join(self._location)
        return _linked(self._location, _BEST)

    def _names_newest_first(self) -> list[str]:
        in_background.join(self._location)
        complete = _complete(self._location)
        latest = _latest(complete, _linked(self._location, _LATEST))
        others = [one.name for one in sorted(complete, reverse=True) if one.name != latest]
        return others if latest is None else [latest, *others]

    def _load(self, name: str, device: str | torch.device | None) -> Any:
        """Return a state on every rank, or raise on every rank.

        A damaged file is the only error of its stage, so that all ranks agree on whether to try an older one.
        """
        damage: list[CheckpointError] = []

        def read() -> Any:
            try:
                return read_state(self._location / name, target_device(device))
            except CheckpointError as error:
                damage.append(error)

        def raise_damage() -> None:
            if damage:
                raise damage[0]

        state = on_all_ranks(read)
        on_all_ranks(raise_damage)
        return state


@dataclasses.dataclass(frozen=True, order=True)
class _Complete:
    """A checkpoint that is there; those saved later are greater."""

    saved_at: int
    step: int
    name: str


def _name(step: int) -> str:
    return f"checkpoint-{step:08d}.pt"


def _write(
    folder: Location, state: object, step: int, *, is_best: bool, keep: int | None, stays: frozenset[str]
) -> None:
    storage, name = folder.storage, _name(step)
    storage.remove_leftovers(folder.place)
    write_state(state, folder / name)
    storage.link((folder / _LATEST).place, name)
    if is_best:
        storage.link((folder / _BEST).place, name)
    if keep is not None:
        stays |= {_linked(folder, _LATEST) or "", _linked(folder, _BEST) or ""}
        for one in sorted(_complete(folder))[:-keep]:
            if one.name not in stays:
                storage.remove((folder / one.name).place)


def _complete(folder: Location) -> list[_Complete]:
    named = [(match, name) for name in folder.storage.list(folder.place) if (match := _NAME.fullmatch(name))]
    return [_Complete(folder.storage.saved_at((folder / name).place), int(match[1]), name) for match, name in named]


def _linked(folder: Location, link: str) -> str | None:
    return folder.storage.linked((folder / link).place)


def _latest(complete: list[_Complete], link: str | None) -> str | None:
    """Return the name of the last checkpoint: the linked one, or one that was saved after it but not yet linked."""
    found = {one.name: one for one in complete}
    linked = found.get(link or "")
    if linked is None:
        return max(found.values(), key=lambda one: one.step).name if found else None
    after = [one for one in found.values() if one.step > linked.step and one.saved_at > linked.saved_at]
    return max([linked, *after]).name


def _warn(skipped: Location, error: Exception) -> None:
    reason = printable(error.error_text) if isinstance(error, RankFailedError) else error
    logger.warning("skipping %s, and loading the checkpoint saved before it: %s", skipped, reason)
