"""What the ranks write down for ``distman keep``, which starts the job again without the host that failed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distman._coordination.failure.record import FailureRecord

VARIABLE = "DISTMAN_KEEP_FOLDER"
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


def note_failure(first: FailureRecord) -> None:
    """Write down the failure of the job as this host sees it, unless another rank of the host has done so."""
    _note(
        FAILURE.format(_node()), {"rank": first.rank, "kind": first.error_type, "text": first.headline}, is_first=True
    )


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
    """Return the name of this host as its scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _note(name: str, said: Mapping[str, object], *, is_first: bool) -> None:
    """Write a file that is there as a whole or not at all; what cannot be written is left out."""
    folder = os.environ.get(VARIABLE)
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
