"""What the pytest process and its workers say to each other.

One test is three exchanges per worker: ``RankTask`` there, ``JOINED`` back; once every rank has joined the process
group, ``BEGIN`` there, ``RankReport`` back; once every rank has ended, ``RELEASE`` there, and a ``RankReport`` of the
end of the group back. So no rank can fail while another is still connecting to it, and none leaves the group while
another still uses it. A rank on which the test raised sends ``RAISED`` before it describes the error, which may take
seconds: pytest reads the source.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum


class Signal(Enum):
    """A message without contents."""

    JOINED = "joined"
    BEGIN = "begin"  # every rank is in the group, or cannot get there
    RAISED = "raised"
    RELEASE = "release"


class RankStatus(Enum):
    """How a rank can end a test; the most telling one first."""

    RAISED = "raised"
    DIED = "died"
    STUCK = "stuck"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    STOPPED = "stopped"
    PASSED = "passed"


@dataclass(frozen=True)
class SeenWarning:
    """A warning that a rank showed, to be shown again by pytest."""

    text: str
    category_module: str
    category_name: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One rank's part of one test."""

    test: str
    rank: int = 0
    world_size: int
    store_file: str = ""
    group_timeout: float
    uses_manager: bool
    backend: str  # of the process group
    backend_module: str  # its import makes the backend known to torch; empty for one that torch knows
    environ: dict[str, str] = field(repr=False)  # secrets may be among them
    directory: str
    search_path: list[str]
    report_directory: str
    traceback_style: str
    shows_locals: bool
    coverage: str  # how coverage.py measures, as its own text; empty if it does not
    call: bytes


@dataclass(frozen=True)
class RankReport:
    """What became of one rank."""

    rank: int
    status: RankStatus
    headline: str = ""  # the error, the signal, the exit code, or the reason of a skip, in one line
    detail: str = ""  # the traceback or the stacks
    warnings: tuple[SeenWarning, ...] = ()
    stdout: str = ""
    stderr: str = ""
    ended_at: float = field(default_factory=time.monotonic)  # comparable between the processes of one machine
