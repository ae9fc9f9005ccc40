"""The numbered checkpoints of a run, the last few of which are kept."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
from pathlib import Path
from typing import Any

import torch

from distman.checkpoint import _background as in_background
from distman.checkpoint._files import real_path, remove_leftovers, replace_file, replace_link
from distman.checkpoint._single_file import load
from distman.checkpoint._state import check_state, copy_to_host, write_state
from distman.decorators import on_rank

_LATEST = "latest.pt"
_BEST = "best.pt"
_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")


class CheckpointFolder:
    """A folder of numbered checkpoints: ``checkpoint-00000120.pt`` and so on, ``latest.pt`` and ``best.pt``.

    Made alike on every rank; rank 0 alone writes, and says what is there. One job writes into a folder at a time.

    Args:
        path: The folder. It is made by the first save.
        keep: How many checkpoints to keep, those that were saved last; the best one stays besides. None keeps all.
        background: Let a thread write while the program goes on.

    Attributes:
        path: The folder.

    Raises:
        ValueError: ``keep`` is less than 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | None = 3, background: bool = True) -> None:
        if keep is not None and operator.index(keep) < 1:
            raise ValueError(f"keep must be at least 1, got {keep}. Pass None to keep all checkpoints.")
        self.path = real_path(path)
        self._keep = keep
        self._is_background = background

    def save(self, state: object, step: int, *, is_best: bool = False) -> None:
        """Save rank 0's state as the checkpoint of a step, then remove those that are not kept.

        Collective. Blocking, as :func:`save` is. A write that is still under way is waited for first.

        Args:
            state: See :func:`save`.
            step: Number of the step, 0 or more.
            is_best: Let ``best.pt`` point to it.

        Raises:
            RankFailedError: On every rank: rank 0 could not save it, see :func:`save`; or could not write the one
                before in the background, and nothing was saved this time.
        """
        on_rank(0)(self._save)(state, step, is_best=is_best)

    def wait(self) -> None:
        """Return when all that was saved is complete and on the disk.

        Collective. Blocking.

        Raises:
            RankFailedError: On every rank: the last checkpoint could not be written. The cause, on rank 0, says why.
        """
        on_rank(0)(in_background.settle)(self.path)

    def latest(self) -> Path | None:
        """Return the path of the checkpoint that was saved last, or None; the same on all ranks.

        Collective. Blocking. A write that is under way is waited for.
        """
        return on_rank(0, broadcast=True)(self._find)(_LATEST)

    def best(self) -> Path | None:
        """Return the path of the best checkpoint, or None; the same on all ranks.

        Collective. Blocking. A write that is under way is waited for.
        """
        return on_rank(0, broadcast=True)(self._find)(_BEST)

    def load_latest(self, *, device: str | torch.device | None = None) -> Any:
        """Return the state that was saved last, on every rank, or None if there is none.

        Collective. Blocking.

        Args:
            device: See :func:`load`.

        Raises:
            CheckpointError: On a rank where the file is damaged.
            RankFailedError: On the other ranks.
        """
        path = self.latest()
        return None if path is None else load(path, device=device)

    def load_best(self, *, device: str | torch.device | None = None) -> Any:
        """Return the best state, on every rank, or None if there is none.

        Collective. Blocking. See :meth:`load_latest`.
        """
        path = self.best()
        return None if path is None else load(path, device=device)

    def _save(self, state: object, step: int, *, is_best: bool) -> None:
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"step must be 0 or more, got {step}. Count the steps from 0.")
        in_background.refuse_after_failure(self.path)
        check_state(state)
        kept = copy_to_host(state) if self._is_background else state
        work = functools.partial(_write, self.path, kept, number, is_best=is_best, keep=self._keep)
        if self._is_background:
            in_background.start(self.path, work)
        else:
            work()

    def _find(self, link: str) -> Path | None:
        in_background.join(self.path)
        found = _latest(self.path) if link == _LATEST else _target(self.path / link)
        return None if found is None else self.path / found


@dataclasses.dataclass(frozen=True, order=True)
class _Complete:
    """A checkpoint that is there; those saved later are greater."""

    saved_at: int
    step: int
    name: str


def _write(folder: Path, state: object, step: int, *, is_best: bool, keep: int | None) -> None:
    remove_leftovers(folder, "*")
    path = folder / f"checkpoint-{step:08d}.pt"
    replace_file(path, functools.partial(write_state, state))
    replace_link(folder / _LATEST, path.name)
    if is_best:
        replace_link(folder / _BEST, path.name)
    if keep is not None:
        linked = {_target(folder / _LATEST), _target(folder / _BEST)}
        for one in sorted(_complete(folder))[:-keep]:
            if one.name not in linked:
                (folder / one.name).unlink(missing_ok=True)


def _complete(folder: Path) -> list[_Complete]:
    named = [(match, path) for path in folder.glob("checkpoint-*.pt") if (match := _NAME.fullmatch(path.name))]
    return [_Complete(path.stat().st_mtime_ns, int(match[1]), path.name) for match, path in named]


def _target(link: Path) -> str | None:
    """Return the name of the file that a link points to; None where there is none, or it leads nowhere."""
    if not link.is_file():
        return None
    return link.readlink().name if link.is_symlink() else link.name


def _latest(folder: Path) -> str | None:
    """Return the name of the last checkpoint: the linked one, or one that was saved after it but not yet linked."""
    found = {one.name: one for one in _complete(folder)}
    linked = found.get(_target(folder / _LATEST) or "")
    if linked is None:
        return max(found.values(), key=lambda one: one.step).name if found else None
    after = [one for one in found.values() if one.step > linked.step and one.saved_at > linked.saved_at]
    return max([linked, *after]).name
