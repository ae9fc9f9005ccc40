"""The numbered checkpoints of a run, the last few of which are kept."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from distman._base.arguments import check_number
from distman._base.log import logger
from distman._base.text import printable
from distman._coordination.failure.starter import note_saved
from distman.checkpoint import _background as in_background
from distman.checkpoint._location import CONTENTS, Location, locate
from distman.checkpoint._single_file import save_in, target_device
from distman.checkpoint._state import read_state
from distman.decorators import _on_all_ranks as on_all_ranks, on_rank
from distman.errors import CheckpointError, RankFailedError
from distman.manager import DistributedManager

_SUFFIX = ".pt"  # of files; folders of a sharded state have none
_NAME = re.compile(r"checkpoint-(\d{8,})(\.pt)?")

T = TypeVar("T")


class CheckpointFolder:
    """A folder of numbered checkpoints: ``checkpoint-00000120.pt`` and so on, ``latest.pt`` and ``best.pt``.

    Made alike on every rank; rank 0 says what is there. One job writes into a folder at a time.

    Args:
        path: The folder, or a URL such as ``s3://bucket/run``. It is made by the first save.
        keep: How many checkpoints to keep, those that were saved last; the best one stays besides. None keeps all.
        background: Let a thread write while the program continues.
        sharded: Let every rank write its part of a checkpoint, as :func:`save_sharded` does, where rank 0 alone writes
            else. Checkpoints are then folders, ``checkpoint-00000120``, ``latest`` and ``best``.

    Attributes:
        path: The folder: a path, or a URL.
        sharded: As given.

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

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int | None = 3, background: bool = True, sharded: bool = False
    ) -> None:
        if keep is not None:
            check_number("keep", keep, remedy="Pass None to keep all checkpoints.")
        self._location = locate(path)
        self.path = self._location.path
        self._keep = keep
        self.sharded = sharded
        self._is_background = background
        self._suffix = "" if sharded else _SUFFIX
        self._latest_link, self._best_link = f"latest{self._suffix}", f"best{self._suffix}"

    def save(self, state: Any, step: int, *, is_best: bool = False, good: Collection[int] = ()) -> None:
        """Save a state as the checkpoint of a step, then remove those that are not kept.

        Collective. Blocking, as :func:`save` and :func:`save_sharded` are. A write that is still under way is waited
        for first.

        Args:
            state: See :func:`save`, where rank 0's counts; of sharded checkpoints :func:`save_sharded`.
            step: Number of the step, 0 or more.
            is_best: Let ``best.pt`` point to it.
            good: Steps whose checkpoints stay, too, as far as they are there.

        Raises:
            Exception: On the rank that could not save it or its part, see :func:`save` and :func:`save_sharded`; or the
                previous save in the background failed there, and nothing was saved this time.
            RankFailedError: On the other ranks, then.

        Example:
            >>> folder = CheckpointFolder("run", keep=1)
            >>> for step, loss in enumerate([0.5, 0.2, 0.4]):
            ...     folder.save({"loss": loss}, step, is_best=loss == 0.2)
            >>> folder.best().name, folder.latest().name
            ('checkpoint-00000001.pt', 'checkpoint-00000002.pt')
        """
        if self.sharded:
            from distman.checkpoint._sharded import save_in as save_parts_in  # torch's part of it takes a second

            self._save(save_parts_in, state, step, is_best=is_best, good=good)
        else:
            on_rank(0)(self._save)(save_in, state, step, is_best=is_best, good=good)

    def wait(self) -> None:
        """Return when all that was saved is complete and on the disk.

        Collective. Blocking.

        Raises:
            Exception: On the rank that could not write the last checkpoint, or its part of a sharded one.
            RankFailedError: On the other ranks, then.
        """
        on_all_ranks(in_background.wait, self._location)

    def latest(self) -> Path | str | None:
        """Return the path of the checkpoint that was saved last, or None; the same on all ranks.

        Collective. Blocking. A write that is under way is waited for.
        """
        names = on_rank(0, broadcast=True)(self._newest_first)()
        return (self._location / names[0]).path if names else None

    def best(self) -> Path | str | None:
        """Return the path of the best checkpoint, or None; the same on all ranks.

        Collective. Blocking. A write that is under way is waited for.
        """
        name = on_rank(0, broadcast=True)(self._best)()
        return None if name is None else (self._location / name).path

    def load_latest(self, state: dict[str, Any] | None = None, *, device: str | torch.device | None = None) -> Any:
        """Return the state that was saved last, on every rank, or None if there is none.

        Collective. Blocking.

        A damaged one is skipped with a warning, as long as there is an older one.

        Args:
            state: What to fill with a sharded checkpoint and return, see :func:`load_sharded`.
            device: See :func:`load`; a sharded state says itself where its tensors are.

        Raises:
            CheckpointError: On a rank where all of them are damaged.
            OSError: On a rank where a file cannot be read for another reason.
            RankFailedError: On the other ranks, then.
            TypeError: There is no state to fill with a sharded checkpoint, or one for another.

        Example:
            >>> folder = CheckpointFolder("run")
            >>> state = folder.load_latest() or {"step": 0}  # of the run before, if there was one
            >>> folder.save({"step": state["step"] + 100}, state["step"] + 100)
            >>> folder.load_latest()
            {'step': 100}
        """
        return read_latest(self, self._reader(state, device))

    def load_best(self, state: dict[str, Any] | None = None, *, device: str | torch.device | None = None) -> Any:
        """Return the best state, on every rank, or None if there is none.

        Collective. Blocking.

        Args:
            state: See :meth:`load_latest`.
            device: See :func:`load`.

        Raises:
            CheckpointError: On a rank where it is damaged.
            RankFailedError: On the other ranks.
            TypeError: See :meth:`load_latest`.

        Example:
            >>> folder = CheckpointFolder("run")
            >>> folder.save({"weight": torch.ones(2)}, 7, is_best=True)
            >>> folder.load_best(device="cpu")
            {'weight': tensor([1., 1.])}
        """
        read, name = self._reader(state, device), on_rank(0, broadcast=True)(self._best)()
        return None if name is None else read(self._location / name)

    def _save(
        self, save: Callable[..., object], state: Any, step: int, *, is_best: bool, good: Collection[int]
    ) -> None:
        check_number("step", step, least=0, remedy="Count the steps from 0.")
        tidy = functools.partial(self._tidy, step, is_best=is_best, stays={self._name(one) for one in good})
        on_rank(0)(self._prepare)()
        save(state, self._location / self._name(step), self._location, background=self._is_background, then=tidy)

    def _prepare(self) -> None:
        self._names()
        self._location.storage.remove_leftovers(self._location.place)

    def _tidy(self, step: int, *, is_best: bool, stays: set[str]) -> None:
        """Let the links name a new checkpoint, and remove those that are not kept."""
        storage, folder, name = self._location.storage, self._location, self._name(step)
        storage.link((folder / self._latest_link).place, name)
        if is_best:
            storage.link((folder / self._best_link).place, name)
        if self._keep is not None:
            stays |= {self._linked(self._latest_link) or "", self._linked(self._best_link) or ""}
            for one in sorted(self._complete())[: -self._keep]:
                if one.name not in stays:
                    storage.remove((folder / one.name).place)
        note_saved(step)

    def _name(self, step: int) -> str:
        return f"checkpoint-{step:08d}{self._suffix}"

    def _best(self) -> str | None:
        in_background.join(self._location)
        return self._linked(self._best_link)

    def _newest_first(self) -> list[str]:
        """Return the names of complete checkpoints, first the linked one, or one saved after it but not yet linked."""
        in_background.join(self._location)
        found = {one.name: one for one in self._complete()}
        if not found:
            return []
        linked = found.get(self._linked(self._latest_link) or "")
        if linked is None:
            latest = max(found.values(), key=lambda one: one.step)
        else:
            after = [one for one in found.values() if one.step > linked.step and one.saved_at > linked.saved_at]
            latest = max([linked, *after])
        return [latest.name, *(one.name for one in sorted(found.values(), reverse=True) if one != latest)]

    def _linked(self, link: str) -> str | None:
        return self._location.storage.linked((self._location / link).place)

    def _complete(self) -> list[_Complete]:
        found = []
        for name, step in self._names().items():
            with contextlib.suppress(FileNotFoundError):  # a folder without its table of contents
                found.append(_Complete(self._saved_at(name), step, name))
        return found

    def _names(self) -> dict[str, int]:
        """Return names of checkpoints, with their steps; the other kind is refused, else a run would begin anew."""
        names = self._location.storage.list(self._location.place)
        matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
        own = {match[0]: int(match[1]) for match in matches if (match[2] or "") == self._suffix}
        if matches and not own:
            raise CheckpointError(
                f"{self._location} must hold checkpoints of one kind, got {matches[0][0]} with sharded={self.sharded}. "
                "Pass the other value, or another folder."
            )
        return own

    def _saved_at(self, name: str) -> int:
        location = self._location / name
        return location.storage.saved_at((location.published() / CONTENTS if self.sharded else location).place)

    def _reader(self, state: dict[str, Any] | None, device: str | torch.device | None) -> Callable[[Location], Any]:
        if self.sharded != isinstance(state, dict):
            raise TypeError(
                f"state must be {'a dict to fill' if self.sharded else 'left out'} with sharded={self.sharded}, got "
                f"{type(state).__name__}. See load_sharded() for what it holds."
            )
        if state is None:
            target = target_device(device)
            return lambda location: on_all_ranks(read_state, location, target)
        from distman.checkpoint._sharded import load_from  # torch's part of it takes a second

        return functools.partial(load_from, state)


def check_writable(folder: CheckpointFolder) -> None:
    """Write a small file into a folder of checkpoints and remove it: this fails sooner than the first checkpoint."""

    def write() -> None:
        location = folder._location / f".writable-{DistributedManager().rank}"
        with location.storage.create(location.place) as file:
            file.write(b"\n")
        location.storage.remove(location.place)

    on_rank(0)(folder._names)()
    if folder.sharded:
        on_all_ranks(write)
    else:
        on_rank(0)(write)()


def read_latest(folder: CheckpointFolder, read: Callable[[Location], T]) -> T | None:
    """Return what a function makes of the checkpoint that was saved last and is not damaged; None if there is none.

    What ``read`` raises, it raises on every rank: CheckpointError where the checkpoint is damaged.
    """
    location = folder._location
    names = on_rank(0, broadcast=True)(folder._newest_first)()
    for name in names[:-1]:
        try:
            return read(location / name)
        except Exception as error:  # noqa: BLE001 - the next line raises it again, or another rank's
            on_all_ranks(_raise_unless_damaged, error)
            on_rank(0)(_warn)(location / name, error)
    return read(location / names[-1]) if names else None


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether a sharded state is at a path, when no write to it is under way any more."""
    in_background.finish_before_reading(locate(path))
    location = locate(path)  # it may be a link
    try:
        location.storage.open((location.published() / CONTENTS).place).close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class _Complete(NamedTuple):
    """A checkpoint that is there; those saved later are greater."""

    saved_at: int
    step: int
    name: str


def _raise_unless_damaged(error: Exception) -> None:
    """Raise an error that an older checkpoint does not help with; on one rank it may be another one than elsewhere."""
    kind = error.error_type if isinstance(error, RankFailedError) else type(error).__name__
    if kind != CheckpointError.__name__:
        raise error


def _warn(skipped: Location, error: Exception) -> None:
    reason = printable(error.error_text) if isinstance(error, RankFailedError) else error
    logger.warning("skipping %s, and loading the checkpoint saved before it: %s", skipped, reason)
