"""What was explored and found, as a page of Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from .cases import Case
from .observe import Outcome

HEAD = """\
# What was explored

"""


@dataclass(frozen=True)
class Finding:
    """A case that was run, and what was wrong."""

    case: Case
    outcome: Outcome
    complaints: tuple[str, ...]

    @property
    def entry(self) -> str:
        """What is said of it in a line, such as ``0.4 s``."""
        seconds = self.outcome.survivors_seconds
        return "no end" if seconds is None else f"{seconds:.1f} s (delay {self.outcome.delay:.1f})"


def as_markdown(findings: Sequence[Finding], seed: int) -> str:
    return HEAD
