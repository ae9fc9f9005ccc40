"""The fates of all ranks as one verdict and one text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distman.testing._messages import Ending, Fate

# What gloo, the stores and distman's own error say on a rank whose only trouble is that another one is gone.
_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|recvValue failed|sendBytes failed|RankFailedError"
)
_LAST_LINES = 20
_KINDS = [*Ending]


def failed(fates: Sequence[Fate], dies: Sequence[int]) -> bool:
    """Return whether a rank neither passed nor died as expected.

    Args:
        fates: One per rank.
        dies: The ranks that must have died.
    """
    return any(fate.ending is not (Ending.DIED if fate.rank in dies else Ending.PASSED) for fate in fates)


def report_failure(fates: Sequence[Fate], dies: Sequence[int]) -> str:
    """Return every rank's fate as text: the first real error's headline, a table, then the tracebacks.

    Args:
        fates: One per rank.
        dies: The ranks that must have died.
    """
    echoes = _echoes(fates, dies)
    ordered = sorted(fates, key=lambda fate: _importance(fate, dies, is_echo=fate.rank in echoes))
    told = {fate.rank: _say(fate, dies, is_echo=fate.rank in echoes) for fate in fates}
    first = told[ordered[0].rank]
    lines = [f"{_name_ranks([rank for rank in told if told[rank] == first])} {first}", ""]
    lines += [f"  rank {rank}: {said}" for rank, said in told.items()]
    lines += _details([fate for fate in ordered if fate.rank not in echoes])
    return "\n".join(lines)


def _echoes(fates: Sequence[Fate], dies: Sequence[int]) -> set[int]:
    """Return the ranks that failed only because another one did; none if no other did."""
    echoes = {fate.rank for fate in fates if fate.ending is Ending.RAISED and _ECHO.search(fate.headline) is not None}
    causes = [
        fate for fate in fates if failed([fate], dies) and fate.ending is not Ending.STOPPED and fate.rank not in echoes
    ]
    return echoes if causes else set()


def _importance(fate: Fate, dies: Sequence[int], *, is_echo: bool) -> tuple[bool, bool, int, float]:
    """Return a sort key: failures before the rest, causes before what followed, the earlier ones first."""
    follows = is_echo or fate.ending is Ending.STOPPED
    return not failed([fate], dies), follows, _KINDS.index(fate.ending), fate.ended_at


def _say(fate: Fate, dies: Sequence[int], *, is_echo: bool) -> str:
    """Return one line for one rank, without its name."""
    headline = fate.headline.partition("\n")[0]
    echo = _ECHO.search(headline) if is_echo else None
    if echo is not None:
        return f"failed only because another rank did ({echo.group()})"
    is_doomed = fate.rank in dies
    return {
        Ending.PASSED: "passed, but was expected to die" if is_doomed else "passed",
        Ending.DIED: f"{headline}, as expected" if is_doomed else headline,
        Ending.RAISED: f"raised {headline}",
        Ending.SKIPPED: f"skipped the test, and not all did: {headline}",
        Ending.XFAILED: f"called pytest.xfail, and not all did: {headline}",
    }.get(fate.ending, headline)


def _details(fates: Sequence[Fate]) -> list[str]:
    """Return the tracebacks and stacks; a text that several ranks share appears once."""
    shown: dict[str, list[int]] = {}
    for fate in fates:
        text = fate.detail or (_last_words(fate) if fate.ending is Ending.DIED else "")
        if text:
            shown.setdefault(text, []).append(fate.rank)
    lines: list[str] = []
    for text, ranks in shown.items():
        lines += ["", f" {_name_ranks(ranks)} ".center(80, "-"), "", text]
    return lines


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _last_words(fate: Fate) -> str:
    lines = fate.stderr.strip().splitlines()[-_LAST_LINES:]
    return "\n".join(["It last wrote to standard error:", *lines]) if lines else ""
