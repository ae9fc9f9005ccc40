"""Saving and loading a state that fits into one process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

import torch

from distman._coordination.failure.pending_work import under_way
from distman._coordination.time_limit import saves
from distman.checkpoint import _background as in_background
from distman.checkpoint._background import BackgroundWrite
from distman.checkpoint._location import Location, locate
from distman.checkpoint._state import check_state, copy_to_host, read_state, write_state
from distman.decorators import _on_all_ranks as on_all_ranks, on_rank
from distman.manager import DistributedManager


class PendingSave:
    """A checkpoint that is being written while the program continues; :func:`save` and :func:`save_sharded` return it.

    Attributes:
        path: Where it will be: a path, or a URL.

    Example:
        >>> pending = save({"step": 7}, "run/state.pt", background=True)
        >>> pending.wait()
        >>> load(pending.path)
        {'step': 7}
    """

    def __init__(self, path: Path | str, write: BackgroundWrite | None) -> None:
        self.path, self._write = path, write

    def wait(self) -> None:
        """Return when the checkpoint is complete and on the disk.

        Collective. Blocking.

        Raises:
            Exception: On the rank that could not write it, or its part: the reason. The previous checkpoint is still
                there.
            RankFailedError: On the other ranks, then.
        """
        on_all_ranks(self._wait)

    def _wait(self) -> None:
        if self._write is not None:
            self._write.wait()


@overload
def save(
    state: object, path: str | os.PathLike[str], *, background: Literal[False] = False, local: bool = False
) -> None: ...


@overload
def save(state: object, path: str | os.PathLike[str], *, background: Literal[True]) -> PendingSave: ...


def save(
    state: object, path: str | os.PathLike[str], *, background: bool = False, local: bool = False
) -> PendingSave | None:
    """Write rank 0's state to a file, which replaces the previous one once it is complete and on the disk.

    Collective. Blocking, as long as it takes; in the background, as long as the copy to the host's memory takes. Killed
    at any moment, it leaves the old file or the whole new one.

    Args:
        state: On rank 0 a dict, list or tuple of tensors, numbers, strings, bools and None, nested at will; elsewhere
            it is ignored. Module and optimizer states are such.
        path: The file, or a URL such as ``s3://bucket/state.pt``; the same on all ranks. Folders above it are made.
        background: Copy the tensors, and let a thread on rank 0 write. The end of the program waits for it. An error
            that nobody waits for is raised by the next save to this path, or logged at the end of the program.
        local: Write this rank's state, and wait for no other rank: for ``except JobFailed``, where the others are gone.
            Where several ranks do it, let each have a path of its own.

    Returns:
        Something to wait for if saved in the background, else None.

    Raises:
        ValueError: On every rank: the scheme of the URL is unknown, or ``local`` is asked for in the background. On
            rank 0: something in the state could not be loaded again, and where.
        ImportError: On a rank where a package is missing that the scheme needs.
        OSError: On rank 0: the disk is full, for example. The old file is as it was.
        CheckpointError: On rank 0: the previous save in the background failed.
        RankFailedError: On the other ranks: rank 0 could not save.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> save({"model": model_state(model), "epoch": 3}, "run/state.pt")
        >>> load("run/state.pt")["epoch"]
        3
    """
    location = locate(path)
    if local and background:
        raise ValueError("background must be False for a local save, got True. Leave one of them out.")
    save_here = save_in if local else on_rank(0)(save_in)
    write = save_here(state, location, location, background=background)
    return PendingSave(location.path, write) if background else None


def save_in(
    state: object,
    location: Location,
    written_to: Location,
    *,
    background: bool,
    then: Callable[[], None] = lambda: None,
) -> BackgroundWrite | None:
    """Write this process's state to a file, and do something when it is there.

    One write at a time may go to ``written_to``: the file, or the folder that it is in.
    """
    in_background.refuse_after_failure(written_to)
    check_state(state)

    def write(checked: object) -> None:
        write_state(checked, location)
        then()

    if background:
        return BackgroundWrite(written_to, functools.partial(write, copy_to_host(state)))
    with under_way(), saves().timed():
        write(state)
    return None


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> Any:
    """Return the state in a file, on every rank.

    Collective. Blocking. Every rank reads the file, after a save in the background to the same path. Nothing in it is
    run.

    Args:
        path: The file, or a URL.
        device: Where the tensors go; None is the manager's device, the CPU in a process that is alone.

    Raises:
        ValueError, ImportError: See :func:`save`.
        ValueError: On a rank that cannot use the device.
        FileNotFoundError: On a rank that does not find the file.
        CheckpointError: On a rank where the file is damaged, not a checkpoint, or holds code to be run; on rank 0, if
            the save in the background failed.
        RankFailedError: On the ranks that could read it, if another could not.

    Example:
        >>> save({"weight": torch.ones(2, dtype=torch.bfloat16)}, "state.pt")
        >>> load("state.pt", device="cpu")
        {'weight': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    on_rank(0)(in_background.finish_before_reading)(locate(path))
    return on_all_ranks(read_state, locate(path), target_device(device))  # it may be a link


def target_device(device: str | torch.device | None) -> torch.device:
    """Return where loaded tensors go: None is the manager's device, the CPU in a process that is alone."""
    if device is not None:
        return torch.device(device)
    manager = DistributedManager.find()
    return manager.device if manager is not None else torch.device("cpu")
