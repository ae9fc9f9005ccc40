"""Whether all ranks see the files that one of them writes."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from distman._base import timing
from distman._base.private_files import open_itself, write_new
from distman._cli.own_job import gather_reports, hand_out
from distman._coordination.wait_scope import collective
from distman.manager import DistributedManager


@dataclass(frozen=True)
class FolderReport:
    path: str  # as rank 0 names it
    problem: str | None  # why rank 0 cannot write there
    unseen: list[int]  # the ranks that do not see what rank 0 wrote
    hosts: list[str]  # theirs, each once

    @property
    def is_shared(self) -> bool:
        return self.problem is None and not self.unseen


@collective
def check_folder(folder: str | Path, manager: DistributedManager) -> FolderReport | None:
    """Return on rank 0 which ranks see a file that it writes into its folder for a moment. Collective.

    The file is removed whatever happens, even where the job is interrupted; so that this can be noticed, no collective
    is run while the file is there. A rank looks for two seconds, since a network file system may be late.
    """
    path, word = Path(folder).absolute(), secrets.token_hex(16)
    file = path / f".distman-check-{secrets.token_hex(8)}"
    try:
        problem = ""
        if manager.is_main:
            try:
                write_new(file, word)
            except OSError as error:
                problem = f"{type(error).__name__}: {error.strerror}"
        told = hand_out(manager, "the folder", (str(file), word, problem), tuple[str, str, str])
        is_seen = not told[2] and _reads(Path(told[0]), told[1])
        reports = gather_reports(manager, "the folder", is_seen, bool)
    finally:
        with contextlib.suppress(OSError):  # it could not even be written
            file.unlink(missing_ok=True)
    if reports is None:
        return None
    unseen = [] if problem else [rank for rank, is_seen in enumerate(reports) if not is_seen]
    hosts = list(dict.fromkeys(manager.roll_call[rank].host for rank in unseen))
    return FolderReport(str(path), problem or None, unseen, hosts)


def _reads(file: Path, word: str) -> bool:
    until = time.monotonic() + timing.CHECK_FOLDER
    while True:
        with contextlib.suppress(OSError):
            descriptor = open_itself(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would keep it waiting
            with os.fdopen(descriptor, "rb") as opened:
                if opened.read(len(word) + 1) == word.encode():
                    return True
        if time.monotonic() > until:
            return False
        time.sleep(timing.CHECK_FOLDER_PAUSE)
