"""What will go wrong later in a job, as far as its variables and this host tell it beforehand."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distman._base import timing
from distman._job.meeting.address import addresses_of, is_own, means_loopback
from distman.environments import (
    BARE,
    LAUNCHERS,
    METHOD,
    LaunchEnvironment,
    Launcher,
    misspelt_variables,
    read_flag,
    read_host,
    read_text,
    spoken,
)

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # ROCm knows both
_NO_DEVICES = ("", "-1", "NoDevFiles", "none", "void")
_FILES_PER_RANK = 2  # connections that collectives open to each rank
_FILES_BESIDES = 100  # files that a rank has open beside its connections: libraries, data, logs


def _first_open_port() -> int:
    limit = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    return int(limit.read_text()) if os.geteuid() != 0 and limit.exists() else 1


def _max_open_files() -> int | None:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft_limit == resource.RLIM_INFINITY else soft_limit


def _resolve(name: str) -> Sequence[str] | None:
    """Ask in a thread, which is abandoned where no answer arrives: the library knows no time limit."""
    found: list[Sequence[str]] = []

    def ask() -> None:
        try:
            found.append(addresses_of(name))
        except OSError:
            found.append([])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timing.NETWORK_QUESTION)
    return found[0] if found else None


def _is_reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=timing.NETWORK_QUESTION).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Host:
    """What this host answers; what a check asks over the network takes a second at most."""

    name: str = field(default_factory=socket.gethostname)
    interfaces: Sequence[str] = field(default_factory=lambda: [name for _, name in socket.if_nameindex()])
    num_cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    num_usable_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    num_gpus: int = field(default_factory=lambda: len([*Path("/dev").glob("nvidia[0-9]*")]))  # visible or not
    first_open_port: int = field(default_factory=_first_open_port)  # that this user may open
    max_open_files: int | None = field(default_factory=_max_open_files)  # None without a limit
    resolve: Callable[[str], Sequence[str] | None] = _resolve  # a name's addresses; None without an answer in time
    is_own: Callable[[str], bool] = is_own
    is_reachable: Callable[[str, int], bool] = _is_reachable  # whether it answers, be it by refusing


@dataclass(frozen=True)
class _Job:
    environ: Mapping[str, str]
    environment: LaunchEnvironment
    host: Host

    @property
    def launcher(self) -> Launcher:
        return LAUNCHERS[self.environment.launcher]

    @property
    def main_address(self) -> tuple[str, str] | None:
        """Name of the host on which the ranks meet, and where that name is from; None where MPI will tell."""
        given, address = read_host(self.environ, "MASTER_ADDR"), self.environment.main_address
        if given is not None:
            return given, "MASTER_ADDR"
        return (address, self.launcher.name) if self.launcher.meets_on_first_node and address is not None else None

    @property
    def is_main_host(self) -> bool:
        """Whether this process is the one that the others look for at the main address."""
        if self.launcher.meets_on_first_node and not read_text(self.environ, "MASTER_ADDR"):
            return (self.environment.node_rank, self.environment.local_rank) == (0, 0)
        return self.environment.rank == 0

    @property
    def local_world_size(self) -> int:
        known = self.environment.world_size if self.environment.is_on_one_node else 1
        return self.environment.local_world_size or known


def diagnose(environ: Mapping[str, str], environment: LaunchEnvironment, host: Host) -> tuple[str, ...]:
    """Return what will go wrong, a sentence with its remedy each."""
    job = _Job(environ, environment, host)
    checks = itertools.chain.from_iterable(check(job) for check in _CHECKS)
    return (*misspelt_variables(environ), *checks)


def _other_launchers(job: _Job) -> Iterator[str]:
    """Another launcher says another rank and size, and is not the one that started one task on each node."""
    chosen = job.environment
    was_told = chosen.launcher == BARE.name or read_text(job.environ, METHOD)  # by a user, or by another launcher
    if was_told or not chosen.is_launched:
        return
    num_nodes = chosen.num_nodes or -(-chosen.world_size // job.local_world_size)
    for other in spoken(job.environ):
        is_same = (other.rank, other.world_size) == (chosen.rank, chosen.world_size)
        is_around = other.world_size in (1, num_nodes)
        # Of mpirun's daemons there is one on each node but that of mpirun itself.
        num_allocated = _num_allocated(job, LAUNCHERS[other.launcher])
        are_daemons = num_allocated is not None and other.world_size == other.num_nodes == num_allocated - 1
        if other.launcher != chosen.launcher and not (is_same or is_around or are_daemons):
            yield (
                f"{other.launcher} says rank {other.rank} of {other.world_size}, but {chosen.launcher} says rank "
                f"{chosen.rank} of {chosen.world_size} and is believed: if one launcher started the other, there are "
                f"several jobs of {chosen.world_size} instead of one. Start with one launcher only, or choose: "
                f"DISTMAN_INITIALIZATION_METHOD={other.launcher}."
            )


def _idle_nodes(job: _Job) -> Iterator[str]:
    """A launcher in a batch script, without the scheduler's own, uses one node of several."""
    if not job.environment.is_launched or not job.environment.is_on_one_node:
        return
    speaking = {job.environment.launcher, *(one.launcher for one in spoken(job.environ))}
    for launcher in LAUNCHERS.values():
        num_nodes = _num_allocated(job, launcher)
        if launcher.name in speaking or launcher.allocation is None or num_nodes is None or num_nodes < 2:
            continue
        command = launcher.allocation.command
        yield (
            f"The {launcher.allocation.title} allocation has {num_nodes} nodes, but {job.environment.launcher} "
            f"runs all {job.environment.world_size} ranks on one: no step of {command} was started. Start it with "
            f"{command}, one {job.environment.launcher} on each node, or start the ranks by {command} itself."
        )


def _num_allocated(job: _Job, launcher: Launcher) -> int | None:
    fields = {} if launcher.allocation is None else launcher.allocation.fields
    return _number(read_text(job.environ, *fields.get("num_nodes", ())) or "")


def _gpus(job: _Job) -> Iterator[str]:
    """CUDA_VISIBLE_DEVICES, or ROCm's name for it, does not give every local rank a GPU of its own."""
    name = next((name for name in _VISIBLE_DEVICES if name in job.environ), None)
    if name is None:
        return
    text = job.environ[name]
    devices = [device.strip() for device in text.split(",")]
    visible = list(itertools.takewhile(lambda device: device not in _NO_DEVICES, devices))
    ranks = job.local_world_size
    has_its_own = job.launcher.has_own_gpus(job.environ) or (len(visible) == 1 and job.launcher.may_bind_gpus)
    if not visible and job.host.num_gpus:
        yield (
            f"{name}={text!r} hides all GPUs of this host: the job computes on the CPU. Unset it, or ask "
            "the scheduler for GPUs."
        )
    elif len(set(visible)) < len(visible):
        yield f"{name}={text!r} names a GPU twice, which CUDA refuses. Name each once."
    elif 0 < len(visible) < ranks and not has_its_own and not read_flag(job.environ, "DISTMAN_ALLOW_SHARED_GPU"):
        gpus = "1 GPU" if len(visible) == 1 else f"{len(visible)} GPUs"
        yield (
            f"{name}={text!r} shows {gpus} to {ranks} ranks on this host: some would share one, which "
            f"NCCL refuses. Start {len(visible)} ranks on each node, or show more GPUs."
        )


def _main_address(job: _Job) -> Iterator[str]:
    """The address at which the ranks meet cannot be resolved, or is the wrong host."""
    if job.main_address is None or not job.environment.is_launched:
        return
    name, source = job.main_address
    addresses = job.host.resolve(name)
    what = f"the main address {name!r} (from {source})"
    if addresses is None:
        yield f"Resolving {what} took too long: each rank will wait for it. Repair DNS, or use an IP address."
    elif not addresses:
        yield f"This host cannot resolve {what}, so the ranks cannot meet there. Correct it, or use an IP address."
    elif not job.environment.is_on_one_node and (job.environment.num_nodes or job.environment.local_world_size):
        yield from _wrong_host(job, name, what, addresses)


def _wrong_host(job: _Job, name: str, what: str, addresses: Sequence[str]) -> Iterator[str]:
    """The main address of a job on several nodes is not the host that opens the store, or cannot be reached."""
    is_own = any(map(job.host.is_own, addresses))
    is_at_home = job.is_main_host or job.environment.node_rank == 0 or name == job.host.name
    port = _number(job.environ.get("MASTER_PORT", ""))
    if all(map(means_loopback, addresses)) and (not is_at_home or means_loopback(name)):
        yield (
            f"In a job on several nodes {what} must not be a loopback address, but it is {addresses[0]}: each "
            "node would look for rank 0 on itself. Set MASTER_ADDR to the name of rank 0's node, or unset it."
        )
    elif job.is_main_host and not is_own:
        yield (
            f"This is rank {job.environment.rank}, which the others look for at the main address, but {what} is "
            f"{addresses[0]}, which is not this host ({job.host.name}). Set MASTER_ADDR to the name of the host on "
            "which rank 0 runs, or unset it."
        )
    elif not is_own and port is not None and not any(job.host.is_reachable(address, port) for address in addresses):
        yield (
            f"This host cannot reach {what}, {addresses[0]}, on port {port}: a firewall or another network "
            "is in the way. Set MASTER_ADDR to an address that all nodes reach, or MASTER_PORT to an open port."
        )


def _threads(job: _Job) -> Iterator[str]:
    """Each of several ranks would start a thread for every core."""
    cores, ranks = job.host.num_usable_cores, job.local_world_size
    if (
        read_text(job.environ, "OMP_NUM_THREADS") is None
        and ranks > 1
        and 1 < cores <= job.host.num_cores < cores * ranks
    ):
        yield (
            f"OMP_NUM_THREADS is not set: each of the {ranks} ranks on this host would use all of {cores} cores, and "
            f"slow the others down. Set OMP_NUM_THREADS={max(1, job.host.num_cores // ranks)}, or let the "
            "launcher bind each rank to its own cores."
        )


def _interfaces(job: _Job) -> Iterator[str]:
    """A variable names a network interface that this host does not have."""
    there = f"It has {', '.join(job.host.interfaces)}: choose one of these, or unset the variable."
    nccl = read_text(job.environ, "NCCL_SOCKET_IFNAME")
    if nccl is not None and not _matches_for_nccl(nccl, job.host.interfaces):
        yield f"NCCL_SOCKET_IFNAME={nccl!r} names no network interface of this host: NCCL cannot start. {there}"
    gloo = read_text(job.environ, "GLOO_SOCKET_IFNAME")
    missing = [name for name in (gloo or "").split(",") if name and name not in job.host.interfaces]
    if missing:
        yield (
            f"GLOO_SOCKET_IFNAME={gloo!r} names {missing[0]!r}, which is not a network interface of this host: gloo "
            f"cannot start. {there}"
        )


def _matches_for_nccl(text: str, interfaces: Sequence[str]) -> bool:
    """Return whether interfaces are left: NCCL takes beginnings of names, ``=`` for whole ones, ``^`` for others."""
    others, is_exact = text.startswith("^"), text.removeprefix("^").startswith("=")
    names = [name for name in text.removeprefix("^").removeprefix("=").split(",") if name]
    named = [one for one in interfaces if (one in names if is_exact else one.startswith(tuple(names)))]
    return len(named) < len(interfaces) if others else bool(named)


def _port(job: _Job) -> Iterator[str]:
    """MASTER_PORT is not a port that a user may open."""
    text = read_text(job.environ, "MASTER_PORT")
    if text is None or not job.environment.is_launched:
        return
    port = _number(text)
    if port is None or not 0 < port < 65536:
        yield f"MASTER_PORT must be a number between 1 and 65535, got {text!r}. Correct or unset it."
    elif port < job.host.first_open_port:
        yield (
            f"MASTER_PORT={port} is a port that only the administrator may open: rank 0 would fail. Choose one between "
            f"{job.host.first_open_port} and 32767, or unset it."
        )


def _open_files(job: _Job) -> Iterator[str]:
    """The limit of open files is too low for connections to all other ranks."""
    size, limit = job.environment.world_size, job.host.max_open_files
    needed = _FILES_PER_RANK * size + _FILES_BESIDES
    if limit is not None and size > 1 and limit < needed:
        yield (
            f"The limit of open files is {limit}, but rank {job.environment.rank} of {size} needs about {needed}, most "
            f"of them connections to other ranks. Run ulimit -n {needed} before the program, in the job script."
        )


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


_CHECKS: tuple[Callable[[_Job], Iterator[str]], ...] = (
    _other_launchers,
    _idle_nodes,
    _main_address,
    _port,
    _gpus,
    _threads,
    _interfaces,
    _open_files,
)
