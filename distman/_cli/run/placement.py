"""How many ranks there are, and the variables that tell each of them its place."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

from distman.environments import DISTMAN_RUN, LAUNCHERS, Family, Place, fake_variables, sets

_LOCALHOST = "127.0.0.1"


def number_of_ranks(wanted: str) -> int:
    """Return how many ranks a number, ``"gpu"``, ``"cpu"`` or ``"auto"`` mean; ValueError where it cannot be."""
    number = int(wanted) if wanted.isascii() and wanted.isdigit() else 0
    if wanted in ("gpu", "auto"):
        import torch  # here: it takes longer to load than all the rest

        number = torch.accelerator.device_count()
    if wanted == "gpu" and not number:
        raise ValueError("n must be a number, cpu or auto where there is no GPU, got gpu. torch sees none here.")
    if wanted == "cpu" or (wanted == "auto" and not number):
        number = len(os.sched_getaffinity(0))
    if not number:
        raise ValueError(f"n must be a number of at least 1, gpu, cpu or auto, got {wanted!r}. Choose one of these.")
    return number


def variables_of_ranks(environ: Mapping[str, str], number: int) -> list[dict[str, str]]:
    """Return the environment of each rank.

    The variables of launchers that this command may run under are left out, but for those of schedulers, and a number
    of threads is added where there is none: a rank's share of the CPUs.
    """
    others = [launcher for launcher in LAUNCHERS.values() if launcher.family in (Family.ENV, Family.MPI)]
    common = {name: value for name, value in environ.items() if not any(sets(other, name) for other in others)}
    common.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // number)))
    job_id = f"run-{uuid.uuid4().hex}"
    with socket.socket() as probe:  # for scripts that open torch's own store; ranks of this package need no port
        probe.bind((_LOCALHOST, 0))
        port = probe.getsockname()[1]
    places = [Place(rank, rank, 0, (number,), _LOCALHOST, port, job_id) for rank in range(number)]
    return [common | fake_variables(DISTMAN_RUN, place) for place in places]
