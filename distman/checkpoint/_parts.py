"""The parts of one checkpoint, which threads of all ranks write, and how that of rank 0 learns that all are there."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from distman._coordination import protocol
from distman._coordination.failure.record import DIED, LEFT, SILENT, FailureRecord
from distman._coordination.messages import decode
from distman._coordination.sync import StoreGroup
from distman._torch_internals import storage_info
from distman.errors import JobFailed
from distman.manager import DistributedManager

_PATIENCE = 30.0  # seconds after a failure: the others end once they have written, and within a minute, see hook.py
_PAUSE = 0.1  # seconds between two looks in that time
_PLACE = "the end of what it saves in the background"


@dataclasses.dataclass(frozen=True)
class _Written:
    """Where a tensor, or a part of it, or an object is."""

    name: str
    offset: list[int] | None
    index: int | None
    size: int
    file: str
    start: int
    length: int

    @classmethod
    def of(cls, result: WriteResult) -> _Written:
        key, place = result.index, result.storage_data
        offset = None if key.offset is None else list(key.offset)
        return cls(key.fqn, offset, key.index, result.size_in_bytes, place.relative_path, place.offset, place.length)

    def result(self) -> WriteResult:
        offset = None if self.offset is None else torch.Size(self.offset)
        place = storage_info()(self.file, self.start, self.length)
        return WriteResult(MetadataIndex(self.name, offset, self.index), self.size, place)


class Parts:
    """What each rank has written of a checkpoint, told over the store under a folder's name that no two saves share.

    Threads take no part in collectives: the calls of the program alone determine the order of these.
    """

    def __init__(self, folder: str) -> None:
        manager = DistributedManager.find()
        self._folder = folder
        self._group = None if manager is None else manager._state.job.store_group()

    def bring(self, write: Callable[[], list[WriteResult]]) -> None:
        """Write this rank's part, not on rank 0, and tell rank 0 what is where, or why it could not be written."""
        try:
            results = write()
        except BaseException as error:
            self.tell(error)
            raise
        self._say([_Written.of(result) for result in results])

    def tell(self, error: BaseException) -> None:
        """Tell rank 0 that the part of this rank, another one, does not come."""
        if self._group is not None and self._group.rank > 0:
            record = FailureRecord.of(error, self._group.rank).to_json()
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
        return [[one.result() for one in written] for written in found]

    def _say(self, written: list[_Written]) -> None:
        if self._group is not None:
            key = protocol.part(self._folder, self._group.rank)
            self._group.store.set(key, json.dumps([dataclasses.asdict(one) for one in written]))

    def _of(self, rank: int, group: StoreGroup) -> list[_Written]:
        key = protocol.part(self._folder, rank)
        is_there = functools.partial(group.store.check, [key])
        until = math.inf
        while not is_there():
            try:
                group.wait_until(is_there, place=_PLACE, awaited=lambda: [rank], key=key)
            except JobFailed as error:  # wherever that was, a rank that lives writes its part before it ends
                until = min(until, time.monotonic() + _PATIENCE)
                is_gone = error.rank == rank and error.error_type in (DIED, LEFT, SILENT)
                if is_gone or time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
        return decode(group.store.get(key), list[_Written], f"what {group.describe(rank)} has written")
