"""What the ranks have said of their failures, each in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distman._coordination.failure.error_file import RECORD
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import MalformedMessageError


def read_error_file(path: Path) -> tuple[FailureRecord | None, FailureRecord | None]:
    """Return what a rank said of its own failure and of the job's first one; None where nothing, or nothing legible.

    What torch's decorator wrote is the failure of nobody known: its rank is -1.
    """
    try:
        said: Any = json.loads(path.read_bytes())
        if RECORD in said:
            return _record(said[RECORD]["own"]), _record(said[RECORD]["first"])
        kind, _, text = said["message"]["message"].partition(": ")
        return FailureRecord(-1, "", 0, kind, text, said["message"]["extraInfo"]["py_callstack"]), None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, MalformedMessageError):
        return None, None


def _record(said: object) -> FailureRecord | None:
    return None if said is None else FailureRecord.decoded(json.dumps(said).encode())
