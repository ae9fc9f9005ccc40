"""Environments as launchers make them, for tests that start nothing, and that of the workers."""

from __future__ import annotations

import os

from distman.environments import LAUNCHERS, METHOD, Place, fake_variables, sets


def fake_environment(launcher: str, *, nodes: int = 1, tasks: int = 1) -> list[dict[str, str]]:
    """Return the environment variables of every rank of a job, in rank order.

    Local. The variables are those that the launcher itself sets. Tasks fill the hosts ``n1``, ``n2``, ... in
    blocks, as evenly as possible, the first hosts taking one more where it does not come out even.

    Args:
        launcher: A launcher's name, such as ``"slurm"`` or ``"torchrun"``; one that was registered will do too.
        nodes: Number of hosts.
        tasks: Number of ranks, at least one for each host.

    Raises:
        ValueError: There is no such launcher, or a host would stay empty.

    Example:
        >>> [environ["SLURM_PROCID"] for environ in fake_environment("slurm", nodes=2, tasks=3)]
        ['0', '1', '2']
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}. Name one of these.")
    if not 1 <= nodes <= tasks:
        raise ValueError(f"nodes must be between 1 and tasks, got {nodes} nodes and {tasks} tasks. Add tasks.")
    if tasks > 1 and not LAUNCHERS[launcher].fields:
        raise ValueError(f"tasks must be 1 without a launcher, got {tasks}. Name a launcher.")
    counts = tuple(tasks // nodes + (node < tasks % nodes) for node in range(nodes))
    places = [(local, node) for node, count in enumerate(counts) for local in range(count)]
    return [fake_variables(LAUNCHERS[launcher], Place(rank, *place, counts)) for rank, place in enumerate(places)]


def worker_environ() -> dict[str, str]:
    """Return this process's environment without its launcher, without GPUs, and on the loopback interface."""
    kept = {name: value for name, value in os.environ.items() if not _says_launcher(name)}
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    kept.setdefault("DISTMAN_WATCH", "0")  # a worker outlives its tests, and is watched by the pytest process
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def server_environ() -> dict[str, str]:
    """Return the environment of the fork server: one thread per library, and a rank's output is written at once."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**worker_environ(), **threads, "PYTHONUNBUFFERED": "1"}


def _says_launcher(name: str) -> bool:
    return name == METHOD or any(sets(launcher, name) for launcher in LAUNCHERS.values())
