"""What was explored and found, as a page of Markdown."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill

from .cases import COLLECTIVE_LIMIT, FAULTS, LAUNCHERS, RENDEZVOUS_LIMIT, SILENCE_LIMIT, Case
from .observe import Outcome

BROKEN = " !"

HEAD = """\
# What was explored

The explorer draws jobs at random: a launcher or none, one or two hosts, 2 to 8 ranks, one or two faults, what the ranks
do meanwhile, and the ordinary code around it. Then it looks from outside whether a promise was broken:

1. no rank hangs;
2. no survivor ends with exit code 0;
3. every survivor names a rank that failed, its host and why, and no other rank;
4. all survivors have ended within the promised time, from which the time is taken off in which threads of the job could
   run but had no core;
5. no process, descriptor, file or shared memory is left.

After a fault that harms nobody, such as a rank that is stopped and continued, all ranks must end with 0 and name
nobody.

{counts}

In the table, `3: 0.9 s` are three jobs, and the longest time from the fault until the last survivor was gone; a job in
which a promise was broken is marked !. After a fault that harms nobody, the time is that of the work which was left.
All jobs ran with `DISTMAN_TIMEOUT={collective}`, `DISTMAN_SILENCE_TIMEOUT={silence}` and
`rendezvous_timeout={rendezvous}`, on a machine of {cpus} cores.

`{command}` runs the same jobs and writes this page; `python -m tests.explore --case LINE` repeats one.

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
        seconds = self.outcome.survivors_seconds(self.case)
        return "no end" if seconds is None else f"{seconds:.1f} s"


def as_markdown(findings: Sequence[Finding], command: str) -> str:
    """Return the page: the table of launchers and faults, what was drawn besides, and every broken promise."""
    head = HEAD.format(
        counts=fill(_counts(findings), 120),
        collective=COLLECTIVE_LIMIT,
        silence=SILENCE_LIMIT,
        rendezvous=RENDEZVOUS_LIMIT,
        cpus=os.cpu_count(),
        command=command,
    )
    broken = [line for finding in findings if finding.complaints for line in _lines(finding)] or ["None."]
    return "\n".join([head + "\n".join(_table(findings)), "", "## Broken promises", "", *broken]) + "\n"


def _counts(findings: Sequence[Finding]) -> str:
    cases = [finding.case for finding in findings]
    several = sum(case.hosts > 1 for case in cases)
    double = sum(len(case.faults) > 1 for case in cases)
    places = _shares([case.place for case in cases])
    around = _shares([case.around for case in cases])
    num_broken = sum(bool(finding.complaints) for finding in findings)
    return (
        f"{len(cases)} jobs were drawn, with {sum(case.ranks for case in cases)} ranks; {several} on two hosts, "
        f"{double} with two faults. Where the ranks were: {places}. The code around the survivors: {around}. "
        f"A promise was broken in {num_broken}."
    )


def _shares(values: Sequence[str]) -> str:
    return ", ".join(f"`{value}` {values.count(value)}" for value in dict.fromkeys(sorted(values)))


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    launchers = [name for name in LAUNCHERS if any(finding.case.launcher == name for finding in findings)]
    yield _row("fault", *launchers)
    yield _row(*["---"] * (1 + len(launchers)))
    for fault in FAULTS:
        with_fault = [finding for finding in findings if finding.case.faults[0].name == fault]
        if with_fault:
            yield _row(f"`{fault}`", *(_cell([f for f in with_fault if f.case.launcher == name]) for name in launchers))


def _cell(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    seconds = [finding.outcome.survivors_seconds(finding.case) for finding in findings]
    known = [value for value in seconds if value is not None]
    longest = f"{max(known):.1f} s" if len(known) == len(seconds) else "no end"
    return f"{len(findings)}: {longest}{BROKEN * any(finding.complaints for finding in findings)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _lines(finding: Finding) -> Iterator[str]:
    yield f"* `{finding.case}`"
    yield from (f"  * `{complaint}`" for complaint in finding.complaints)
