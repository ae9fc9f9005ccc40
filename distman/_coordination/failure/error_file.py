"""The file in which the starter of this process reads why it failed: torchrun, or ``distman run``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

from distman._base.private_files import write_new
from distman._coordination.failure.record import EXITED, FailureRecord
from distman._coordination.restart_notes import note_failure
from distman.environments import LAUNCHERS, detect
from distman.errors import DistmanError

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file. torch's decorator ``record`` writes it too.

Source:
    PyTorch documentation, torch.distributed.elastic, Error Propagation.
"""

RECORD = "distman"
"""Key of what only this package writes and reads."""


def write_error_file(rank: int, mine: FailureRecord, first: FailureRecord | None) -> None:
    """Say why a rank fails, unless it was said.

    torchrun blames the rank with the earliest time, in whole seconds. So a rank that is not the first to fail gives the
    next second.
    """
    note_failure(first or mine)
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
    path = os.environ.get(VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # it is there already, or its folder is gone
            write_new(Path(path), json.dumps(said))


def is_shown_by_starter() -> bool:
    """Return whether this process need not print why it failed, since its starter will."""
    try:
        launcher = LAUNCHERS[detect(os.environ).environment.launcher]
    except (DistmanError, ValueError):
        return False
    return launcher.shows_errors and VARIABLE in os.environ and Path(os.environ[VARIABLE]).exists()
