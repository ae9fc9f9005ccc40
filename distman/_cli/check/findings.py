"""What ``distman check`` found, as a value: what is wrong, what is worth a look, and the words for it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from distman._base import timing
from distman._base.text import listed
from distman._cli.check.hosts import RankReport, facts_in, problems_in, warnings_in
from distman._cli.output import MAX_NAMED, show_seconds, shown_ranks

if TYPE_CHECKING:
    from distman._cli.check.network import Link
    from distman._cli.check.shared_folder import FolderReport
    from distman._cli.timing import Measurement
    from distman._job.meeting.peers import Peer
    from distman._job.meeting.secret import Protection


K = TypeVar("K", bound=Hashable)
# Seconds above the median below which a difference is the noise of a busy host, and nobody is called slow.
_LATENCY_MARGIN = 1e-3
_LARGE_MARGIN = 2e-3
_COMPUTE_MARGIN = 2e-3
_LARGE_BITS = 8 << 20
_FAST_ENOUGH = 10_000  # Mbit/s, of which one connection has a tenth in any case
_MAX_NAMED = 3  # slow ranks or links; where there are more, the median is the finding


@dataclasses.dataclass
class Findings:
    """What was found; rank 0 has all of it."""

    peers: Sequence[Peer]
    backend: str | None  # None where there is no process group
    launcher: str
    protection: Protection
    # The ranks on which a collective was not exact, by its name; what was not run is not there.
    wrong: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    speeds: list[Measurement] = dataclasses.field(default_factory=list)
    links: list[Link] = dataclasses.field(default_factory=list)
    hosts: list[RankReport] = dataclasses.field(default_factory=list)
    compute: list[float] = dataclasses.field(default_factory=list)  # seconds of a matrix product on each rank
    # The working directory and, behind it, that of ``--folder``, if given.
    folders: list[FolderReport] = dataclasses.field(default_factory=list)
    step: str = ""  # the one that is being taken, or was last
    error: str | None = None  # why the check ended early


def problems(findings: Findings) -> list[str]:
    """Return a sentence for each thing that is wrong, for which the exit code is 1."""
    sentences = [
        f"{name} must be exact, got other values on {listed((str(findings.peers[rank]) for rank in ranks), MAX_NAMED)}."
        for name, ranks in findings.wrong.items()
        if ranks
    ]
    sentences += [
        f"--folder must be one that all ranks see, got {_who_sees(folder)}."
        for folder in findings.folders[1:]
        if not folder.is_shared
    ]
    sentences += problems_in(findings.hosts, findings.peers) if findings.hosts else []
    return [*sentences, findings.error] if findings.error else sentences


def warnings(findings: Findings) -> list[str]:
    """Return a sentence for each thing that is worth a look: slow ranks, links, the folder, who may come in."""
    sentences = [*warnings_in(findings.hosts, findings.peers)] if findings.hosts else []
    sentences += _slow_links(findings)
    times = dict(enumerate(findings.compute))
    sentences += [
        f"{findings.peers[rank]} computes slowly: {_times(times[rank], times.values())} for a matrix product."
        for rank in find_slow(times, margin=_COMPUTE_MARGIN)[:_MAX_NAMED]
    ]
    sentences += [
        f"the working directory is not shared: {_who_sees(folder)}. Write checkpoints to a folder that is."
        for folder in findings.folders[:1]
        if not folder.is_shared
    ]
    return [*sentences, *findings.protection.warnings]


def facts(findings: Findings) -> list[str]:
    """Return a line for each thing that was found in order or measured; the last one is about the collectives."""
    lines = [*facts_in(findings.hosts, findings.peers)] if findings.hosts else []
    for kind, links in _by_kind(findings).items():
        slowest = max(links, key=lambda link: link.seconds)
        times = [link.seconds for link in links]
        lines.append(
            f"slowest link {kind}: {_of_link(slowest, findings.peers)}, 8 B in {show_seconds(slowest.latency)}, "
            f"1 MiB in {_times(slowest.seconds, times)}"
        )
    if len(findings.compute) > 1:
        rank = max(range(len(findings.compute)), key=findings.compute.__getitem__)
        lines.append(
            f"slowest to compute: {findings.peers[rank]}, a matrix product in "
            f"{_times(findings.compute[rank], findings.compute)}"
        )
    num_ranks, num_nodes = len(findings.peers), findings.peers[0].num_nodes
    whom = f"all {num_ranks} ranks see" if num_ranks > 1 else "rank 0 can write to"
    lines += [f"folder {folder.path}: {whom} it" for folder in findings.folders if folder.is_shared]
    if findings.protection.protected_by is not None:
        lines.append(f"protected by {findings.protection.protected_by}")
    if findings.wrong and not any(findings.wrong.values()) and findings.error is None:
        where = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {num_nodes} node{'s' * (num_nodes > 1)}"
        backend = findings.backend or "no process group"
        lines.append(f"all {len(findings.wrong)} collectives exact on {where} ({backend})")
    return lines


def as_json(findings: Findings) -> dict[str, Any]:
    parts = ("hosts", "speeds", "links", "folders")
    return {
        "world_size": len(findings.peers),
        "num_nodes": findings.peers[0].num_nodes,
        "backend": findings.backend,
        "initialization_method": findings.launcher,
        "protected_by": findings.protection.protected_by,
        "ranks": [dataclasses.asdict(peer) for peer in findings.peers],
        "wrong_ranks": sorted({rank for ranks in findings.wrong.values() for rank in ranks}),
        "collectives": findings.wrong,
        **{name: [dataclasses.asdict(one) for one in getattr(findings, name)] for name in parts},
        "compute": findings.compute,
        "problems": problems(findings),
        "warnings": warnings(findings),
        "is_ok": not problems(findings),
    }


def _by_kind(findings: Findings) -> Mapping[str, list[Link]]:
    """Return the links within a host and between hosts, which are not to be compared with each other."""
    kinds: dict[str, list[Link]] = {}
    for link in findings.links:
        is_within = findings.peers[link.first].node_rank == findings.peers[link.second].node_rank
        kinds.setdefault("within a host" if is_within else "between hosts", []).append(link)
    return kinds


def _slow_links(findings: Findings) -> list[str]:
    sentences = [
        f"{_of_link(link, findings.peers)} is slow: {words}."
        for link in _by_kind(findings).get("between hosts", [])
        for words in _slow_by_itself(link, findings.hosts)
    ][:_MAX_NAMED]
    for links in _by_kind(findings).values():
        for size, margin, seconds in (
            ("8 B", _LATENCY_MARGIN, {link: link.latency for link in links}),
            ("1 MiB", _LARGE_MARGIN, {link: link.seconds for link in links}),
        ):
            slow = find_slow(seconds, margin=margin)
            sentences += [
                f"{_of_link(link, findings.peers)} is slow: {_times(seconds[link], seconds.values())} for {size}."
                for link in slow[:_MAX_NAMED]
            ]
            common = set.intersection(*({link.first, link.second} for link in slow)) if len(slow) > 1 else set()
            sentences += [f"{findings.peers[rank]} is at one end of all {len(slow)} slow links." for rank in common]
    return sentences


def _slow_by_itself(link: Link, reports: Sequence[RankReport]) -> list[str]:
    """Return what is slow about a link between hosts, with which no other one need be compared."""
    words = [f"{show_seconds(link.latency)} for 8 B"] if link.latency > timing.CHECK_LATENCY else []
    used = [reports[rank].used for rank in (link.first, link.second)] if reports else []
    speeds = [interface.speed for interface in used if interface and interface.speed]
    megabits = _LARGE_BITS / 1e6 / link.seconds
    if speeds and 10 * megabits < min(*speeds, _FAST_ENOUGH):
        words.append(f"{megabits:.0f} of {min(speeds):,} Mbit/s for 1 MiB")
    return words


def _of_link(link: Link, peers: Sequence[Peer]) -> str:
    first, second = (f"rank {rank} ({peers[rank].host})" for rank in (link.first, link.second))
    return f"{first} to {second}"


def _times(seconds: float, every: Any) -> str:
    return f"{show_seconds(seconds)} ({seconds / statistics.median_low(every):.1f} times the median)"


def _who_sees(folder: FolderReport) -> str:
    if folder.problem is not None:
        return f"{folder.path}, where rank 0 cannot write ({folder.problem})"
    return f"{folder.path}, which is not that of rank 0 on {', '.join(folder.hosts)} ({shown_ranks(folder.unseen)})"


def find_slow(seconds: Mapping[K, float], *, margin: float) -> list[K]:
    """Return whose time is above three times the median, and by seconds that somebody would notice, slowest first."""
    if not seconds:
        return []
    median = statistics.median_low(seconds.values())
    limit = max(3 * median, median + margin)
    return sorted((key for key, value in seconds.items() if value > limit), key=lambda key: -seconds[key])
