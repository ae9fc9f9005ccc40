"""What the pytest process and its workers say to each other.

One test is three exchanges per worker: ``RankTask`` there, ``Joined`` back; once every rank has joined the process
group, ``Begin`` there, ``RankResult`` back; once every rank has ended, ``Release`` there, ``Released`` back. So no
rank can fail while another is still connecting to it, and none leaves the group while another still uses it. A rank on
which the test raised says ``Raised`` before it describes the error, which may take seconds: pytest reads the source.

With a debugger, a rank that fails says ``Failing`` before its ``RankResult`` and waits for ``Debug``. If that chooses
it, it says ``DebuggerOutput`` and ``DebuggerInput``, which a line of text answers, until it says ``DebuggerEnd``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RankStatus(Enum):
    """How a rank can end a test; what says most about a failure comes first."""

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


@dataclass(frozen=True)
class RankTask:
    """One rank's part of one test.

    ``backend`` is that of the process group, which the import of ``backend_module`` makes known to torch; empty for one
    that torch knows. ``coverage`` is how coverage.py measures, as its own text; empty if it does not. ``debugs`` says
    whether a rank that fails asks for a debugger.
    """

    test: str
    rank: int
    world_size: int
    store_file: str
    group_timeout: float
    uses_manager: bool
    backend: str
    backend_module: str
    environ: dict[str, str] = field(repr=False)  # secrets may be among them
    directory: str
    search_path: list[str]
    report_directory: str
    traceback_style: str
    shows_locals: bool
    coverage: str
    debugs: bool
    call: bytes


@dataclass(frozen=True)
class RankResult:
    """How the test ended on one rank that is still there to say so."""

    status: RankStatus
    headline: str
    detail: str
    ended_at: float
    warnings: list[SeenWarning]
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raised:
    """The test has raised an error on this rank, which describes it now."""


@dataclass(frozen=True)
class Failing:
    """The test has failed on this rank, which still has its frames."""

    headline: str
    detail: str


@dataclass(frozen=True)
class Debug:
    """Whether the debugger is to look at this rank."""

    is_chosen: bool


@dataclass(frozen=True)
class DebuggerOutput:
    """What the debugger shows."""

    text: str


@dataclass(frozen=True)
class DebuggerInput:
    """The debugger waits for a line."""


@dataclass(frozen=True)
class DebuggerEnd:
    """The debugger was left, by ``quit`` or to go on with the next test."""

    quits: bool


@dataclass(frozen=True)
class Joined:
    """The rank is in the process group, and waits for the others."""


@dataclass(frozen=True)
class Begin:
    """Every rank is in the process group, or cannot get there: call the test."""


@dataclass(frozen=True)
class Release:
    """Every rank has ended: leave the process group and put the state back."""


@dataclass(frozen=True)
class Released:
    """The worker waits for the next task; ``problem`` is a ``RankResult`` if putting things back raised."""

    problem: RankResult | None


@dataclass(frozen=True)
class RankReport:
    """What became of one rank, as the pytest process sees it."""

    rank: int
    status: RankStatus
    headline: str  # the error, the signal, the exit code, or the reason of a skip, in one line
    detail: str  # the traceback or the stacks
    ended_at: float  # by ``time.monotonic()``, comparable between the processes of one machine
    stdout: str
    stderr: str
    warnings: tuple[SeenWarning, ...] = ()
    types: tuple[str, ...] = ()  # of what it raised, the most special one first, as ``module:name``
