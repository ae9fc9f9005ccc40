"""Saving and loading a state of which each rank has a part, through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from distman._torch_internals import NO_JOB_WARNING, set_nested
from distman.checkpoint._all_or_none import on_all_ranks
from distman.checkpoint._files import NewFolder, put_back, real_path
from distman.checkpoint._metadata import read_metadata
from distman.checkpoint._state import check_state
from distman.decorators import on_rank
from distman.errors import CheckpointError
from distman.manager import DistributedManager


def save_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the parts that all ranks have into a folder, which appears when it is complete and on the disk.

    Collective. Blocking. Killed at any moment, it leaves the old folder or the whole new one.

    Args:
        state: Nested dicts and lists. Of a DTensor every rank writes its part; of what several ranks have under one
            name besides, one writes it for all: give what differs from rank to rank a name of its own.
        path: The folder, the same on all ranks, where all of them can write. Folders above it are made.

    Raises:
        ValueError: On a rank where something in the state could not be loaded again; it says where.
        OSError: On a rank that could not write.
        RankFailedError: On the other ranks. The old folder is as it was.

    Source:
        The format is that of ``torch.distributed.checkpoint``.
    """
    place = real_path(path)
    made: list[NewFolder] = []

    def prepare() -> Path:
        made.append(NewFolder(place))
        return made[0].path

    on_all_ranks(functools.partial(_check, state))
    temporary = on_rank(0, broadcast=True)(prepare)()
    try:
        on_all_ranks(functools.partial(_run, functools.partial(_write, state, temporary)))
        on_rank(0)(_publish)(made)
    except BaseException:  # whatever ends it, Ctrl-C too: nothing stays half written
        for folder in made:
            folder.discard()
        raise


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fill a state in place with what was saved, by as many ranks as it may have been.

    Collective. Blocking. Nothing in the folder is run, whoever wrote it.

    Args:
        state: As it was saved, in names and shapes. Every rank gets those parts of a DTensor that it has here; what is
            no tensor is replaced.
        path: The folder.

    Raises:
        FileNotFoundError: On a rank that finds no such folder.
        CheckpointError: On a rank where it is damaged, does not fit the state, or holds code to be run.
        RankFailedError: On the other ranks.
    """
    place = real_path(path)
    on_rank(0)(put_back)(place)
    metadata = on_all_ranks(functools.partial(read_metadata, place))
    on_all_ranks(functools.partial(_run, functools.partial(_read, state, place, metadata)))


class _Files(FileSystem):
    """Says what the system said, a full disk say, where torch says that a file has an unexpected length."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            reason: BaseException | None = error
            while reason is not None:
                if isinstance(reason, OSError):
                    raise OSError(reason.errno, reason.strerror, str(path)) from None
                reason = reason.__context__
            raise


class _Reader(FileSystemReader):
    """Reads what a table of contents says that was read before."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Loads what is no tensor without running it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_nested(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def _check(state: dict[str, Any]) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, got {type(state).__name__}. Put it into one.")
    check_state(state, is_sharded=True)


def _write(state: dict[str, Any], folder: Path | None) -> None:
    writer = FileSystemWriter(str(folder))
    writer.fs = _Files()
    with _quiet_on_one_process():
        checkpoint.save(state, storage_writer=writer)


def _publish(made: list[NewFolder]) -> None:
    made[0].publish()


def _read(state: dict[str, Any], folder: Path, metadata: Metadata) -> None:
    try:
        with _quiet_on_one_process():
            checkpoint.load(state, storage_reader=_Reader(folder, metadata), planner=_Planner())
    except CheckpointException as failure:
        error = _own_error(failure)
        if error is None or isinstance(error, OSError | MemoryError | torch.OutOfMemoryError):
            raise
        raise CheckpointError(
            f"{folder} must be whole and fit the state, got {type(error).__name__}: {error}. Load it into a state of "
            "the same names and shapes, or load another one."
        ) from error


def _run(work: Callable[[], None]) -> None:
    """Do something through torch, which tells all ranks of an error on one; go on here if it is not this rank's."""
    try:
        work()
    except CheckpointException as failure:
        error = _own_error(failure)
        if error is not None:
            raise error from None


def _own_error(failure: CheckpointException) -> BaseException | None:
    rank = DistributedManager().rank if DistributedManager.is_initialized() else 0
    return failure.failures[rank][0] if rank in failure.failures else None


@contextlib.contextmanager
def _quiet_on_one_process() -> Iterator[None]:
    """Keep torch from warning that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_JOB_WARNING)
        yield
