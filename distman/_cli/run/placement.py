"""How many ranks there are, which CPUs each of them has, and the variables that tell it."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

from distman.environments import DISTMAN_RUN, LAUNCHERS, Family, Place, fake_variables, sets

_THREADS = "OMP_NUM_THREADS"
_LOCALHOST = "127.0.0.1"


def number_of_ranks(wanted: str, cpus_per_rank: int | None = None) -> int:
    """Return how many ranks a number, ``"gpu"``, ``"cpu"`` or ``"auto"`` mean; ValueError where it cannot be."""
    num_cpus = len(os.sched_getaffinity(0))
    number = int(wanted) if wanted.isascii() and wanted.isdigit() else 0
    if wanted in ("gpu", "auto"):
        import torch  # here: it takes longer to load than all the rest

        number = torch.accelerator.device_count()
    if wanted == "gpu" and not number:
        raise ValueError("n must be a number, cpu or auto where there is no GPU, got gpu. torch sees none here.")
    if wanted == "cpu" or (wanted == "auto" and not number):
        number = max(1, num_cpus // (cpus_per_rank or 1))
    if not number:
        raise ValueError(f"n must be a number of at least 1, gpu, cpu or auto, got {wanted!r}. Choose one of these.")
    if cpus_per_rank and number * cpus_per_rank > num_cpus:
        raise ValueError(
            f"--cpus-per-rank must leave each of {number} ranks CPUs of its own, got {cpus_per_rank} on {num_cpus} "
            "CPUs. Start fewer ranks, or leave it out: then they share all CPUs."
        )
    return number


def cpus_of_ranks(number: int, cpus_per_rank: int) -> list[list[int]]:
    """Return the CPUs of each rank: neighbours, so that no two ranks share a core or a socket without need."""
    cpus = sorted(os.sched_getaffinity(0), key=_place_of_cpu)
    return [sorted(cpus[i * cpus_per_rank : (i + 1) * cpus_per_rank]) for i in range(number)]


def _place_of_cpu(cpu: int) -> tuple[int, int, int]:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # a container may hide it
        return 0, cpu, cpu
    return package, core, cpu


def variables_of_ranks(environ: Mapping[str, str], number: int, cpus_per_rank: int | None) -> list[dict[str, str]]:
    """Return the environment of each rank.

    The variables of launchers that this command may run under are left out, but for those of schedulers, and a number
    of threads is added where there is none: a rank's share of the CPUs.
    """
    others = [launcher for launcher in LAUNCHERS.values() if launcher.family in (Family.ENV, Family.MPI)]
    common = {name: value for name, value in environ.items() if not any(sets(other, name) for other in others)}
    if cpus_per_rank:
        common[_THREADS] = str(cpus_per_rank)
    else:
        common.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // number)))
    job_id = f"run-{uuid.uuid4().hex}"
    with socket.socket() as probe:  # for scripts that open torch's own store; ranks of this package need no port
        probe.bind((_LOCALHOST, 0))
        port = probe.getsockname()[1]
    places = [Place(rank, rank, 0, (number,), _LOCALHOST, port, job_id) for rank in range(number)]
    return [common | fake_variables(DISTMAN_RUN, place) for place in places]
