"""What makes a job slow or hang on some of its hosts: each rank says what it sees there, and rank 0 what that means."""

from __future__ import annotations

import os
import platform
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distman._base.text import Line
from distman._cli.diagnostics import Host, diagnose
from distman._cli.output import shown_ranks
from distman._job.meeting.address import addresses_of
from distman._job.network import interface_of

if TYPE_CHECKING:
    from distman._job.meeting.peers import Peer
    from distman.environments import LaunchEnvironment

K = TypeVar("K")
V = TypeVar("V")
_NETWORKS = Path("/sys/class/net")
_LOOPBACK = "772"  # ARPHRD_LOOPBACK of linux/if_arp.h


@dataclass(frozen=True)
class Interface:
    name: Line
    is_up: bool
    speed: int  # in Mbit/s; 0 where the driver does not say
    mtu: int  # in bytes

    def __str__(self) -> str:
        return f"{self.name} ({f'{self.speed / 1000:g} Gbit/s, ' if self.speed else ''}MTU {self.mtu})"


@dataclass(frozen=True)
class RankReport:
    """What a rank says of its host, and of its own place there."""

    cores: list[int]  # that it may use
    num_cores: int  # of the host
    python: Line
    used: Interface | None  # by which gloo speaks to other hosts
    others: list[Interface]
    told: list[Line]  # of its variables, as `distman env` does
    problems: list[Line]  # of the host, as `distman check --quick` does; of its first rank alone


def look(environment: LaunchEnvironment, *, is_first: bool) -> RankReport:
    from distman._cli.check.quick import problems_of_host

    host = Host()
    found = [*_interfaces()]
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or _interface_of_name()
    return RankReport(
        cores=sorted(os.sched_getaffinity(0)),
        num_cores=host.num_cores,
        python=".".join(platform.python_version_tuple()[:2]),
        used=next((one for one in found if one.name == name), None),
        others=[one for one in found if one.name != name and one.is_up],
        told=[*diagnose(os.environ, environment, host)] if is_first else [],
        problems=problems_of_host(with_gpus=False) if is_first else [],
    )


def problems_in(reports: Sequence[RankReport], peers: Sequence[Peer]) -> Iterator[str]:
    """Return a sentence for each host that cannot run ranks well."""
    for report, peer in zip(reports, peers, strict=True):
        yield from (f"{peer.host} {problem}." for problem in report.problems)


def warnings_in(reports: Sequence[RankReport], peers: Sequence[Peer]) -> Iterator[str]:
    """Return a sentence for each thing that makes ranks slow, or wait for ever."""
    pairs = [*zip(reports, peers, strict=True)]
    told = _by_value((sentence, peer.host) for report, peer in pairs for sentence in report.told)
    yield from (f"on {_listed(hosts)}: {sentence}" for sentence, hosts in told.items())
    yield from _shared_cores(reports, peers)
    yield from _unlike("Python", _by_value((report.python, peer.host) for report, peer in pairs))
    yield from _unlike("torch", _by_value((peer.torch, peer.host) for peer in peers))
    if peers[0].num_nodes > 1:
        yield from _interfaces_in_use({peer.host: report for report, peer in pairs})


def facts_in(reports: Sequence[RankReport], peers: Sequence[Peer]) -> Iterator[str]:
    """Return a line on the interfaces between hosts."""
    pairs = zip(reports, peers, strict=True)
    used = _by_value((str(report.used), peer.host) for report, peer in pairs if report.used is not None)
    if peers[0].num_nodes > 1:
        yield from (f"gloo uses {interface} on {_listed(hosts)}" for interface, hosts in used.items())


def _shared_cores(reports: Sequence[RankReport], peers: Sequence[Peer]) -> Iterator[str]:
    """Ranks that are bound to fewer cores than they are, while the host has others."""
    pairs = zip(reports, peers, strict=True)
    bound = _by_value(
        ((peer.machine, tuple(report.cores)), peer.rank)
        for report, peer in pairs
        if len(report.cores) < report.num_cores
    )
    for ((host, _), cores), ranks in bound.items():
        if len(ranks) > len(cores):
            yield (
                f"{shown_ranks(ranks)} on {host} take turns on core{'s' * (len(cores) > 1)} {_listed(map(str, cores))} "
                f"of {reports[ranks[0]].num_cores}. Bind each to cores of its own: srun --cpu-bind=cores, mpirun "
                "--bind-to core, or no binding at all."
            )


def _unlike(what: str, hosts: Mapping[str, list[str]]) -> Iterator[str]:
    if len(hosts) > 1:
        shown = "; ".join(f"{version} on {_listed(names)}" for version, names in hosts.items())
        yield f"the ranks have unlike versions of {what}: {shown}. Install one on all hosts."


def _interfaces_in_use(reports: Mapping[str, RankReport]) -> Iterator[str]:
    for host, report in reports.items():
        faster = [one for one in report.others if report.used and one.speed > 2 * report.used.speed > 0]
        if faster:
            best = max(faster, key=lambda one: one.speed)
            yield (
                f"gloo uses {report.used} on {host}, which also has {best}. If all hosts have that, set "
                f"GLOO_SOCKET_IFNAME={best.name}, and NCCL_SOCKET_IFNAME for GPUs."
            )
    sizes = _by_value((report.used.mtu, host) for host, report in reports.items() if report.used is not None)
    if len(sizes) > 1:
        shown = "; ".join(f"{mtu} on {_listed(hosts)}" for mtu, hosts in sizes.items())
        yield f"the largest packet (MTU) differs: {shown}. Large messages may then hang; let it be the same."


def _interfaces() -> Iterator[Interface]:
    for folder in sorted(_NETWORKS.iterdir()) if _NETWORKS.is_dir() else []:
        with suppress(OSError, ValueError):
            if (folder / "type").read_text().strip() != _LOOPBACK:
                is_up = (folder / "operstate").read_text().strip() == "up"
                yield Interface(folder.name, is_up, _speed(folder), int((folder / "mtu").read_text()))


def _speed(folder: Path) -> int:
    with suppress(OSError, ValueError):
        return max(0, int((folder / "speed").read_text()))
    return 0


def _interface_of_name() -> str | None:
    """Return the interface that gloo uses by default: the one with the address of this host's name."""
    with suppress(OSError):
        return next(filter(None, map(interface_of, addresses_of(socket.gethostname()))), None)
    return None


def _by_value(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found = defaultdict(list)
    for value, one in pairs:
        found[value].append(one)
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
