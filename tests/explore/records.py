"""What the ranks of a case leave for the observer, and for each other: a folder with a file for each thing."""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds, more than a loaded machine needs to start a job


class Records:
    """The folder of a case. Rank 1 leaves there ``1.identity``, ``1.arrived``, ``1.fault``, ``1.clean`` and ``1.end``.

    All that it says is in ``1.said``, and ``1.tmp`` is its folder for temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, rank: int, name: str, **fields: Any) -> None:
        """Write a record, of which a reader sees all or nothing."""
        path = self.folder / f"{rank}.{name}"
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(json.dumps(fields))
        unfinished.rename(path)

    def read(self, rank: int, name: str) -> dict[str, Any]:
        """Return what a rank recorded, nothing if it did not."""
        with suppress(FileNotFoundError):
            record: dict[str, Any] = json.loads((self.folder / f"{rank}.{name}").read_text())
            return record
        return {}

    def said(self, rank: int) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / f"{rank}.said").read_text(errors="replace")
        return ""

    def wait_for(self, name: str, ranks: Iterable[int]) -> None:
        until = time.monotonic() + PATIENCE
        for rank in ranks:
            while not (self.folder / f"{rank}.{name}").exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"rank {rank} must leave the record {name!r} within {PATIENCE:g} s")
                time.sleep(0.01)
