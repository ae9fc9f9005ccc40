"""The parts of one checkpoint, which threads of all ranks write, and how rank 0's thread learns that all are there."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure.record import DIED, LEFT, SILENT, FailureRecord
from distman._coordination.messages import decode
from distman._coordination.sync import StoreGroup
from distman._torch_internals import storage_info
from distman.errors import JobFailed
from distman.manager import DistributedManager

_PLACE = "the end of what it saves in the background"


_Row = tuple[str, list[int] | None, int | None, int, str, int, int]
"""Where a tensor, a part of it, or an object is: name, offset, index, size, file, its beginning there, its length."""


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
        self._say([_row_of(result) for result in results])

    def report_failure(self, error: BaseException) -> None:
        """Report to rank 0 that this rank, another one, writes no part."""
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
        return [[_result_of(*row) for row in rows] for rows in found]

    def _say(self, rows: list[_Row]) -> None:
        if self._group is not None:
            self._group.store.set(protocol.part(self._folder, self._group.rank), json.dumps(rows))

    def _of(self, rank: int, group: StoreGroup) -> list[_Row]:
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
        return decode(group.store.get(key), list[_Row], f"what {group.describe(rank)} has written")


def _row_of(result: WriteResult) -> _Row:
    key, place = result.index, result.storage_data
    offset = None if key.offset is None else list(key.offset)
    return key.fqn, offset, key.index, result.size_in_bytes, place.relative_path, place.offset, place.length


def _result_of(
    name: str, offset: list[int] | None, index: int | None, size: int, file: str, start: int, length: int
) -> WriteResult:
    key = MetadataIndex(name, None if offset is None else torch.Size(offset), index)
    return WriteResult(key, size, storage_info()(file, start, length))
