"""The reports of all ranks as one text."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

from distman._base.text import printable, printable_lines
from distman.testing._messages import RankReport, RankStatus

# What gloo, the stores and distman's own error say on a rank whose only trouble is that another one is gone.
_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|recvValue failed|sendBytes failed|RankFailedError|JobFailed"
)
_LAST_LINES = 20
_KINDS = [*RankStatus]
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(Current thread|Thread) (?P<id>0x[0-9a-f]+)")
_OWN_FILE = "distman/testing/_rank_loop.py"
_IDLE = re.compile(r"distman/_coordination/timeouts\.py.* in _do_next$")  # a thread that waits for work of the package


def report_failure(reports: Sequence[RankReport], dies: Sequence[int]) -> str:
    """Return every rank's report as text: the first real error's headline, a table, then the tracebacks."""
    echoes = _echoes(reports, dies)

    def importance(report: RankReport) -> tuple[bool, bool, int, float]:
        """Sort failures before the rest, causes before what followed, the earlier ones first."""
        follows = report.rank in echoes or report.status is RankStatus.STOPPED
        return not has_failed([report], dies), follows, _KINDS.index(report.status), report.ended_at

    ordered = sorted(reports, key=importance)
    lines_of = {report.rank: _line(report, dies, is_echo=report.rank in echoes) for report in reports}
    first = lines_of[ordered[0].rank]
    lines = [f"{_name_ranks([rank for rank in lines_of if lines_of[rank] == first])} {first}", ""]
    lines += [f"  rank {rank}: {line}" for rank, line in lines_of.items()]
    lines += _details([report for report in ordered if report.rank not in echoes])
    return "\n".join(lines)


def has_failed(reports: Sequence[RankReport], dies: Sequence[int]) -> bool:
    """Return whether a rank neither passed nor died as expected."""
    return any(
        report.status is not (RankStatus.DIED if report.rank in dies else RankStatus.PASSED) for report in reports
    )


def _echoes(reports: Sequence[RankReport], dies: Sequence[int]) -> set[int]:
    """Return the ranks that failed only because another one did; none if no other did."""
    echoes = {report.rank for report in reports if report.status is RankStatus.RAISED and _ECHO.search(report.headline)}
    others = [one for one in reports if one.rank not in echoes and one.status is not RankStatus.STOPPED]
    return echoes if has_failed(others, dies) else set()


def _line(report: RankReport, dies: Sequence[int], *, is_echo: bool) -> str:
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
        detail = report.detail or (_last_output(report) if report.status is RankStatus.DIED else "")
        text = printable_lines(detail, indent="")
        if text:
            shown.setdefault(text, []).append(report.rank)
    lines: list[str] = []
    for text, ranks in shown.items():
        lines += ["", f" {_name_ranks(ranks)} ".center(80, "-"), "", text]
    return lines


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _last_output(report: RankReport) -> str:
    lines = report.stderr.strip().splitlines()[-_LAST_LINES:]
    return "\n".join(["It last wrote to standard error:", *lines]) if lines else ""


def readable_stacks(dump: str) -> str:
    """Return the threads of ``faulthandler``'s dump, the one that runs the test first, innermost frame last."""
    if not dump.strip():
        return "Its stacks cannot be shown: the process did not respond to the signal that asks for them."
    test: list[str] = []
    others: list[str] = []
    for block in re.split(r"\n\s*\n", dump.strip()):
        title, *frames = block.splitlines()
        if frames and _IDLE.search(frames[0]):
            continue
        own = [index for index, frame in enumerate(frames) if _OWN_FILE in frame]
        if own:  # without the frames of the worker around the test
            test += ["The thread of the test (innermost call last):", *_with_sources(frames[: own[0]])]
        else:
            thread = _THREAD.match(title)
            name = f"Thread {thread['id']}" if thread else title
            others += ["", f"{name} (innermost call last):", *_with_sources(frames)]
    return "\n".join([*test, *others]).strip()


def _with_sources(frames: Sequence[str]) -> list[str]:
    lines = []
    for frame in reversed(frames):
        lines.append(frame)
        match = _FRAME.match(frame)
        source = linecache.getline(match["file"], int(match["line"])).strip() if match else ""
        if source:
            lines.append(f"    {source}")
    return lines
