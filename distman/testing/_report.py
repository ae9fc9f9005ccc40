"""The reports of all ranks as one verdict and one text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from distman._base.text import printable, printable_lines
from distman.testing._messages import RankReport, RankStatus

# What gloo, the stores and distman's own error say on a rank whose only trouble is that another one is gone.
_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|recvValue failed|sendBytes failed|RankFailedError|JobFailed"
)
_LAST_LINES = 20
_KINDS = [*RankStatus]


def failed(reports: Sequence[RankReport], dies: Sequence[int]) -> bool:
    """Return whether a rank neither passed nor died as expected."""
    return any(
        report.status is not (RankStatus.DIED if report.rank in dies else RankStatus.PASSED) for report in reports
    )


def report_failure(reports: Sequence[RankReport], dies: Sequence[int]) -> str:
    """Return every rank's report as text: the first real error's headline, a table, then the tracebacks."""
    echoes = _echoes(reports, dies)
    ordered = sorted(reports, key=lambda report: _importance(report, dies, is_echo=report.rank in echoes))
    told = {report.rank: _say(report, dies, is_echo=report.rank in echoes) for report in reports}
    first = told[ordered[0].rank]
    lines = [f"{_name_ranks([rank for rank in told if told[rank] == first])} {first}", ""]
    lines += [f"  rank {rank}: {said}" for rank, said in told.items()]
    lines += _details([report for report in ordered if report.rank not in echoes])
    return "\n".join(lines)


def common_types(reports: Sequence[RankReport], dies: Sequence[int]) -> list[str]:
    """Return the types that whatever went wrong by itself on any rank is of, the most special one first."""
    causes = _causes(reports, dies, _echoes(reports, dies))
    return [one for one in causes[0].types if all(one in cause.types for cause in causes)] if causes else []


def _echoes(reports: Sequence[RankReport], dies: Sequence[int]) -> set[int]:
    """Return the ranks that failed only because another one did; none if no other did."""
    echoes = {
        report.rank
        for report in reports
        if report.status is RankStatus.RAISED and _ECHO.search(report.headline) is not None
    }
    return echoes if _causes(reports, dies, echoes) else set()


def _causes(reports: Sequence[RankReport], dies: Sequence[int], echoes: Collection[int]) -> list[RankReport]:
    return [
        report
        for report in reports
        if failed([report], dies) and report.status is not RankStatus.STOPPED and report.rank not in echoes
    ]


def _importance(report: RankReport, dies: Sequence[int], *, is_echo: bool) -> tuple[bool, bool, int, float]:
    """Return a sort key: failures before the rest, causes before what followed, the earlier ones first."""
    follows = is_echo or report.status is RankStatus.STOPPED
    return not failed([report], dies), follows, _KINDS.index(report.status), report.ended_at


def _say(report: RankReport, dies: Sequence[int], *, is_echo: bool) -> str:
    """Return one line for one rank, without its name."""
    headline = printable(report.headline.partition("\n")[0])
    echo = _ECHO.search(headline) if is_echo else None
    if echo is not None:
        return f"failed only because another rank did ({echo.group()})"
    is_doomed = report.rank in dies
    return {
        RankStatus.PASSED: "passed, but was expected to die" if is_doomed else "passed",
        RankStatus.DIED: f"{headline}, as expected" if is_doomed else headline,
        RankStatus.RAISED: f"raised {headline}",
        RankStatus.SKIPPED: f"skipped the test, and not all did: {headline}",
        RankStatus.XFAILED: f"called pytest.xfail, and not all did: {headline}",
    }.get(report.status, headline)


def _details(reports: Sequence[RankReport]) -> list[str]:
    """Return the tracebacks and stacks; a text that several ranks share appears once."""
    shown: dict[str, list[int]] = {}
    for report in reports:
        words = report.detail or (_last_words(report) if report.status is RankStatus.DIED else "")
        text = printable_lines(words, indent="")
        if text:
            shown.setdefault(text, []).append(report.rank)
    lines: list[str] = []
    for text, ranks in shown.items():
        lines += ["", f" {_name_ranks(ranks)} ".center(80, "-"), "", text]
    return lines


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _last_words(report: RankReport) -> str:
    lines = report.stderr.strip().splitlines()[-_LAST_LINES:]
    return "\n".join(["It last wrote to standard error:", *lines]) if lines else ""
