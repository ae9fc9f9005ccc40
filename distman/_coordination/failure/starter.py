"""What this process tells its starter of a failure: torchrun, ``distman run`` or ``distman keep``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distman._base.private_files import write_new
from distman._coordination.failure.record import EXITED, FailureRecord
from distman.environments import LAUNCHERS, detect
from distman.errors import DistmanError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file. torch's decorator ``record`` writes it too.

Source:
    PyTorch documentation, torch.distributed.elastic, Error Propagation.
"""

RECORD = "distman"
"""Key of what only this package writes and reads."""

KEEP_FOLDER = "DISTMAN_KEEP_FOLDER"
"""The variable that names a folder which all hosts see, one for each try."""

HOST, FAILURE, SAVED = "host-{}.json", "failure-{}.json", "saved.json"
"""The files: of each host its ranks, of each host the failure that it saw first, and the last step that was saved."""

OUT_OF_MEMORY = "oom_kill "
"""The line of ``/proc/vmstat`` that counts the processes that the kernel ended for memory.

Source:
    Linux kernel, mm/vmstat.c.
"""


def note_host(ranks: Sequence[int]) -> None:
    """Write down which ranks this host has; called by the first of them."""
    step = os.environ.get("SLURM_STEP_ID")
    _note(HOST.format(_node()), {"ranks": list(ranks), "oom_kills": count_oom_kills(), "step": step}, is_first=False)


def note_saved(step: int) -> None:
    """Write down the step of the checkpoint that is complete now; called by one rank."""
    _note(SAVED, {"step": step}, is_first=False)


def count_oom_kills() -> int:
    """Return how many processes of this host the kernel has ended for lack of memory since it started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith(OUT_OF_MEMORY):
                return int(line.removeprefix(OUT_OF_MEMORY))
    return 0


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _note(name: str, said: Mapping[str, object], *, is_first: bool) -> None:
    """Write a file that is there as a whole or not at all; what cannot be written is left out."""
    folder = os.environ.get(KEEP_FOLDER)
    if not folder:
        return
    with contextlib.suppress(OSError):
        descriptor, draft = tempfile.mkstemp(dir=folder, prefix=".note-")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(said, file)
        path = Path(folder, name)
        if is_first:
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
            Path(draft).unlink()
        else:
            Path(draft).replace(path)


def write_error_file(rank: int, mine: FailureRecord, first: FailureRecord | None) -> None:
    """Say why a rank fails, unless it was said.

    torchrun blames the rank with the earliest time, in whole seconds. So a rank that is not the first to fail gives the
    next second.
    """
    told = first or mine
    seen = {"rank": told.rank, "kind": told.error_type, "text": told.headline}
    _note(FAILURE.format(_node()), seen, is_first=True)  # the failure of the job as this host sees it
    own = mine if mine.rank == rank else None
    if own is not None and own.error_type == EXITED:
        return  # which says nothing of why: the starter shows what the rank wrote last
    first = first or (None if own else mine)
    record = first or mine
    is_first = record.rank == rank
    text = f"{record.error_type}: {record.error_text}" if is_first else record.headline
    details = {"py_callstack": record.traceback_text, "timestamp": str(int(time.time()) + (not is_first))}
    ours = {name: said and dataclasses.asdict(said) for name, said in (("own", own), ("first", first))}
    said = {"message": {"message": text, "extraInfo": details}, RECORD: ours}
    path = os.environ.get(ERROR_FILE)
    if path:
        with contextlib.suppress(OSError):  # it is there already, or its folder is gone
            if own is not None and has_told_of_another():
                Path(path).unlink()
            write_new(Path(path), json.dumps(said))
            _of_another[:] = [path] if own is None else []


_of_another: list[str] = []  # the file that this process has written about another rank alone


def has_told_of_another() -> bool:
    """Return whether the starter is told of another rank's failure alone: what this one raises itself came after it."""
    return os.environ.get(ERROR_FILE) in _of_another


def is_shown_by_starter() -> bool:
    """Return whether this process need not print why it failed, since its starter will."""
    try:
        launcher = LAUNCHERS[detect(os.environ).environment.launcher]
    except (DistmanError, ValueError):
        return False
    return launcher.shows_errors and ERROR_FILE in os.environ and Path(os.environ[ERROR_FILE]).exists()
