"""Saving and loading a state that is sharded over the ranks, through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Literal, cast, overload

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    SavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from distman._base import timing
from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure.record import DIED, LEFT, SILENT, FailureRecord
from distman._coordination.messages import decode, encode
from distman._coordination.sync import StoreGroup
from distman._coordination.time_limit import saves
from distman._torch_internals import NO_JOB_WARNING
from distman.checkpoint import _background as in_background
from distman.checkpoint._background import BackgroundWrite
from distman.checkpoint._contents import Row, encoded, read_contents, result_of, row_of
from distman.checkpoint._location import CONTENTS, Location, NewFolder, Storage, locate
from distman.checkpoint._single_file import PendingSave
from distman.checkpoint._state import check_file, check_state, map_state, reason_of, writing_to
from distman.decorators import _on_all_ranks as on_all_ranks, on_rank
from distman.errors import CheckpointError, JobFailed
from distman.manager import DistributedManager

_PLACE = "the end of what it saves in the background"


@overload
def save_sharded(
    state: dict[str, Any], path: str | os.PathLike[str], *, background: Literal[False] = False
) -> None: ...


@overload
def save_sharded(state: dict[str, Any], path: str | os.PathLike[str], *, background: Literal[True]) -> PendingSave: ...


def save_sharded(
    state: dict[str, Any], path: str | os.PathLike[str], *, background: bool = False
) -> PendingSave | None:
    """Write the shards of all ranks into a folder, which appears when it is complete and on the disk.

    Collective. Blocking, as long as it takes; in the background, as long as the copy to the host's memory takes. Killed
    at any moment, it leaves the old folder or the whole new one.

    Args:
        state: Nested dicts and lists. Every rank writes its shards of DTensors. Anything else that several ranks have
            under one name is written once: give what differs from rank to rank a name of its own.
        path: The folder, or a URL; the same on all ranks, where all of them can write. Folders above it are made.
        background: Copy what this rank writes, and let a thread write it; the folder appears when all ranks have done
            so. The end of the program waits for it, and so does ``cleanup()``. An error that nobody waits for is raised
            by the next save to this path, or logged at the end of the program.

    Returns:
        Something to wait for if saved in the background, else None.

    Raises:
        ValueError: On a rank where something in the state could not be loaded again; it says where. On every rank, if
            the scheme of the URL is unknown.
        ImportError: On a rank where a package is missing that the scheme needs.
        OSError: On a rank that could not write. On rank 0, if the place is a file, or a folder with something else.
        CheckpointError: On a rank where the previous save to this path in the background failed.
        RankFailedError: On the other ranks. The old folder is as it was.

    Example on two ranks:
        >>> save_sharded({"step": 7, f"seed of rank {rank}": 10 + rank}, "run")
        >>> state = {"step": 0, "seed of rank 1": 0}
        >>> load_sharded(state, "run")
        >>> state
        {'step': 7, 'seed of rank 1': 11}

    Source:
        The format is that of ``torch.distributed.checkpoint``, with a table of contents in JSON beside torch's.
    """
    location = locate(path)
    return save_in(state, location, location, background=background)


def save_in(
    state: dict[str, Any],
    location: Location,
    written_to: Location,
    *,
    background: bool,
    then: Callable[[], None] = lambda: None,
) -> PendingSave | None:
    """Write a state into a folder, as :func:`save_sharded` does.

    One write at a time may go to ``written_to``: the folder, or one that it is in. ``then`` is what rank 0 does when
    the folder has appeared, in its thread if threads write.
    """
    made: list[NewFolder] = []

    def prepare() -> str:
        location.storage.check_replaceable(location.place, CONTENTS)
        made.append(location.storage.new_folder(location.place))
        return made[0].path

    on_all_ranks(_check, state, written_to)
    with _discarded_on_error(made):
        temporary = str(on_rank(0, broadcast=True)(prepare)())
        if background:
            writer = _StagingWriter(temporary, location.storage)
            on_all_ranks(_write, state, writer)
            write = on_all_ranks(_start, writer, Parts(temporary), made, written_to, then)
            return PendingSave(location.path, write)
        with saves().timed():
            on_all_ranks(_write, state, _Writer(temporary, location.storage))
            on_rank(0)(_publish)(made, then)
        return None


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fill a state in place with what was saved, by any number of ranks.

    Collective. Blocking. A save in the background to the same path is waited for. Nothing in the folder is run.

    Args:
        state: With the names and shapes that were saved, or some of the names. Every rank gets the shards of DTensors
            that it has here; what is not a tensor is replaced.
        path: The folder, or a URL.

    Raises:
        ValueError, ImportError: See :func:`save`.
        ValueError: On a rank whose state has an empty dict, or a shorter list, where more was saved.
        FileNotFoundError: On a rank that finds no such folder.
        CheckpointError: On a rank where it is damaged, does not fit the state, or holds code to be run.
        RankFailedError: On the other ranks.

    Example:
        >>> save_sharded({"weight": torch.ones(3), "step": 7}, "run")
        >>> state = {"weight": torch.zeros(3), "step": 0}
        >>> load_sharded(state, "run")
        >>> state
        {'weight': tensor([1., 1., 1.]), 'step': 7}
    """
    on_all_ranks(in_background.finish_before_reading, locate(path))  # each forgets why its part failed
    load_from(state, locate(path))  # it may be a link


def load_from(state: dict[str, Any], location: Location) -> dict[str, Any]:
    folder, metadata = _folder_and_metadata(location)
    on_all_ranks(_check_fit, state, folder, metadata)  # torch begins by waiting for all ranks
    on_all_ranks(_read, state, folder, metadata)
    return state


def saved_tensors(location: Location) -> dict[str, tuple[torch.Size, torch.dtype]]:
    entries = _folder_and_metadata(location)[1].state_dict_metadata
    tensors = {name: one for name, one in entries.items() if isinstance(one, TensorStorageMetadata)}
    return {name: (one.size, one.properties.dtype) for name, one in tensors.items()}


def _folder_and_metadata(location: Location) -> tuple[Location, Metadata]:
    on_rank(0)(location.published)()  # one rank puts an old folder back where that is needed
    folder = on_all_ranks(location.published)
    return folder, on_all_ranks(read_contents, folder)


class _Files(FileSystemBase):
    """What torch needs of a file system, from a storage; writing appears whole there, so torch has nothing to add."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        place = os.fspath(path)
        if mode == "rb":
            with self._storage.open(place) as file:
                yield cast("io.IOBase", file)
        else:
            with self._storage.create(place) as file, writing_to(file) as stream:
                yield cast("io.IOBase", stream)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copy torch's table of contents, the only file that it renames, since an object store cannot."""
        with self.create_stream(path, "rb") as old, self.create_stream(new_path, "wb") as new:
            new.write(old.read())
        self.rm_file(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Leave it to the storage, which makes folders when it creates files."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.linked(os.fspath(path)) is not None

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.remove(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's signature
        return True


class _Writer(FileSystemWriter):
    """Writes the parts of this rank through a storage, which syncs what it writes."""

    def __init__(self, folder: str, storage: Storage) -> None:
        super().__init__(folder, sync_files=False)
        self.fs, self.path = _Files(storage), folder  # type: ignore[assignment] # the annotation is torch's local one

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's table of contents, for its own readers, and then ours."""
        super().finish(metadata, results)
        with self.fs.create_stream(f"{self.path}/{CONTENTS}", "wb") as file:
            file.write(encoded(metadata, results))


class _StagingWriter(_Writer):
    """Copies what this rank is to write, and writes it later, without the others."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._plan, self._staged = plan, _Staged(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's signature
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        """Write this rank's part."""
        return super().write_data(self._plan, self._staged).wait()

    def write_contents(self, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, on rank 0, from what all ranks have written."""
        super().finish(self._metadata, results)


class _Staged(DefaultSavePlanner):
    """Copies of what a rank writes, which share no memory with the state."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            self._copies[item.index] = data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._copies[write_item.index]


class _Reader(FileSystemReader):
    """Reads what a table of contents says that was read before, and compares the checksums."""

    def __init__(self, folder: Location, metadata: Metadata) -> None:
        super().__init__(folder.place)
        self.fs, self.path = _Files(folder.storage), folder.place  # type: ignore[assignment] # as above
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        part = io.BytesIO(file.read(sinfo.length))  # torch's own view of it seeks wrongly from the end
        check_file(part)
        return part


class _SavePlanner(DefaultSavePlanner):
    """Leaves out the empty parts of tensors of fewer rows than ranks, which torch may take for the first part."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty_part(item)])
        return self.plan


def _is_empty_part(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and not data.chunk.sizes.numel() and data.size.numel() > 0


class _Planner(DefaultLoadPlanner):
    """Loads what is no tensor without running it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)  # checked as it was read
        *outer, name = self.mappings[read_item.dest_index.fqn]
        holder: Any = self.original_state_dict
        for one in outer:
            holder = holder[_key_of(one, holder)]
        holder[_key_of(name, holder)] = loaded


def _key_of(name: str | int, holder: Any) -> Any:
    """Return the key that has this name in torch's paths, where keys of dicts are strings."""
    return name if isinstance(holder, list) or name in holder else next(key for key in holder if str(key) == name)


def _check(state: dict[str, Any], written_to: Location) -> None:
    in_background.refuse_after_failure(written_to)
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, got {type(state).__name__}. Put it into one.")
    check_state(state, is_sharded=True)


def _write(state: dict[str, Any], writer: _Writer) -> None:
    if (error := _error_of(checkpoint.save, state, storage_writer=writer, planner=_SavePlanner())) is not None:
        raise error


def _publish(made: list[NewFolder], then: Callable[[], None]) -> None:
    made[0].publish()
    then()


def _start(
    writer: _StagingWriter, parts: Parts, made: list[NewFolder], written_to: Location, then: Callable[[], None]
) -> BackgroundWrite:
    """Start this rank's thread; that of rank 0 takes over the new folder."""
    try:
        write = BackgroundWrite(written_to, functools.partial(_write_part, writer, parts, made[:], then))
    except BaseException as error:
        parts.report_failure(error)
        raise
    made.clear()
    return write


def _write_part(writer: _StagingWriter, parts: Parts, made: list[NewFolder], then: Callable[[], None]) -> None:
    if not made:
        parts.report(writer.write)
        return
    with _discarded_on_error(made):
        try:
            own = writer.write()
        finally:  # a rank that goes on writing would put a folder back that has been discarded
            others = parts.of_others()
        writer.write_contents([own, *others])
        _publish(made, then)


@contextlib.contextmanager
def _discarded_on_error(made: list[NewFolder]) -> Iterator[None]:
    try:
        yield
    except BaseException:  # including KeyboardInterrupt: nothing half-written stays
        for folder in made:
            folder.discard()
        raise


def _check_fit(state: dict[str, Any], folder: Location, metadata: Metadata) -> None:
    named: set[str] = set()

    def note(value: Any, name: str) -> Any:
        named.add(name)
        return value

    map_state(state, note)
    _check_room(state, sorted(metadata.state_dict_metadata.keys() - named), folder)


def _check_room(
    value: Any, unnamed: list[str], folder: Location, where: str = "state", path: tuple[object, ...] = ()
) -> None:
    """Refuse an empty dict, or a shorter list, in the place of one of which more was saved: torch would leave it out.

    ``unnamed`` are the saved names that the state does not have; in a dict, a rank may leave out those of others.
    """
    is_list = isinstance(value, list)
    if not unnamed or not (is_list or isinstance(value, Mapping)):
        return
    for key, item in enumerate(value) if is_list else value.items():
        _check_room(item, unnamed, folder, f"{where}[{key!r}]", (*path, key))
    start = ".".join(map(str, (*path, len(value), "") if is_list else (*path, "")))
    lost = [one for one in unnamed if f"{one}.".startswith(start)] if path and (is_list or not value) else []
    if lost:
        raise ValueError(
            f"{where} must have room for what was saved in it, got {len(value)} entries, and {folder} has "
            f"{printable(lost[0])} besides. Fill it before, an optimizer's by one step; or leave the whole of it out."
        )


def _read(state: dict[str, Any], folder: Location, metadata: Metadata) -> None:
    error = _error_of(checkpoint.load, state, storage_reader=_Reader(folder, metadata), planner=_Planner())
    if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError):
        raise error
    if error is not None:
        raise CheckpointError(
            f"{folder} is damaged or does not fit the state: {reason_of(error)}. Load it into a state of the same "
            "names and shapes, or load another one."
        ) from error


def _error_of(call: Callable[..., None], state: dict[str, Any], **options: Any) -> BaseException | None:
    """Let torch save or load; return this rank's error, not those of others, of which torch tells all ranks."""
    manager = DistributedManager.find()
    rank, is_alone = (0, True) if manager is None else (manager.rank, not manager.distributed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_JOB_WARNING)
            call(state, no_dist=is_alone, **options)  # alone, whatever process group other code has made
    except CheckpointException as failure:
        return failure.failures[rank][0] if rank in failure.failures else None
    return None


class Parts:
    """What each rank has written of a checkpoint, in the store under a folder's name that no two saves share.

    Threads take no part in collectives: the calls of the program alone determine the order of these.
    """

    def __init__(self, folder: str) -> None:
        manager = DistributedManager.find()
        self._folder = folder
        self._group = None if manager is None else manager._state.job.store_group()

    def report(self, write: Callable[[], list[WriteResult]]) -> None:
        """Write this rank's part, on another rank than 0; report to rank 0 what is where, or why it failed."""
        try:
            results = write()
        except BaseException as error:
            self.report_failure(error)
            raise
        self._say([row_of(result) for result in results])

    def report_failure(self, error: BaseException) -> None:
        """Report to rank 0 that this rank, another one, writes no part."""
        if self._group is not None and self._group.rank > 0:
            record = encode(FailureRecord.of(error, self._group.rank))
            self._group.store.compare_set(protocol.failure_of(self._folder), "", record)
            self._say([])

    def of_others(self) -> list[list[WriteResult]]:
        """Return what the other ranks have written, on rank 0, once all have ended."""
        group = self._group
        if group is None:
            return []
        found = [self._of(rank, group) for rank in range(1, group.size)]
        failure = protocol.failure_of(self._folder)
        error = group.store.get(failure) if group.store.check([failure]) else None
        group.store.delete_keys([failure, *[protocol.part(self._folder, rank) for rank in range(1, group.size)]])
        if error is not None:
            raise FailureRecord.decoded(error, f"why a part of {self._folder} could not be written").to_error()
        return [[result_of(row) for row in rows] for rows in found]

    def _say(self, rows: list[Row]) -> None:
        if self._group is not None:
            self._group.store.set(protocol.part(self._folder, self._group.rank), json.dumps(rows))

    def _of(self, rank: int, group: StoreGroup) -> list[Row]:
        key = protocol.part(self._folder, rank)
        is_there = functools.partial(group.store.check, [key])
        until = math.inf
        while not is_there():
            try:
                group.wait_until(is_there, place=_PLACE, awaited=lambda: [rank], key=key)
            except JobFailed as error:  # wherever that was, a rank that lives writes its part before it ends
                until = min(until, time.monotonic() + timing.PARTS_AFTER_FAILURE)
                is_gone = error.rank == rank and error.error_type in (DIED, LEFT, SILENT)
                if is_gone or time.monotonic() > until:
                    raise
                time.sleep(timing.PARTS_PAUSE)
        return decode(group.store.get(key), list[Row], f"what {group.describe(rank)} has written")
