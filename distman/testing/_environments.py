"""Environments as launchers make them, for tests that start nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Place = tuple[int, int, int, int]
"""Rank, index of the host, rank on the host, number of ranks on the host."""


def fake_environment(launcher: str, *, nodes: int = 1, tasks: int = 1) -> list[dict[str, str]]:
    """Return the environment variables of every rank of a job, in rank order.

    Local. The variables are those that the launcher itself sets. Tasks fill the hosts ``n1``, ``n2``, ... in
    blocks, as evenly as possible, the first hosts taking one more where it does not come out even.

    Args:
        launcher: A launcher's name, such as ``"slurm"`` or ``"torchrun"``.
        nodes: Number of hosts.
        tasks: Number of ranks, at least one for each host.

    Raises:
        ValueError: There is no such launcher, or a host would stay empty.

    Example:
        >>> [environ["SLURM_PROCID"] for environ in fake_environment("slurm", nodes=2, tasks=3)]
        ['0', '1', '2']
    """
    if launcher not in _MAKERS:
        raise ValueError(f"launcher must be one of {', '.join(_MAKERS)}, got {launcher!r}. Correct it.")
    if not 1 <= nodes <= tasks:
        raise ValueError(f"nodes must be between 1 and tasks, got {nodes} nodes and {tasks} tasks. Correct them.")
    if launcher == "single" and tasks > 1:
        raise ValueError(f"tasks must be 1 for one process without a launcher, got {tasks}. Name a launcher.")
    counts = [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]
    places = [(node, local, count) for node, count in enumerate(counts) for local in range(count)]
    make = _MAKERS[launcher]
    return [make((rank, *place), counts) for rank, place in enumerate(places)]


def _torchrun(place: Place, counts: list[int]) -> dict[str, str]:
    _, node, _, _ = place
    return _env(place, counts) | {
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(counts)),
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "fake",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _env(place: Place, counts: list[int]) -> dict[str, str]:
    rank, _, local, count = place
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(counts)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "n1",
    }


def _openmpi(place: Place, counts: list[int]) -> dict[str, str]:
    rank, node, local, count = place
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(sum(counts)),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "PMIX_HOSTNAME": f"n{node + 1}",
        "PMIX_NAMESPACE": "prterun-n1-1000@1",
        "PMIX_RANK": str(rank),
    }


def _hydra(place: Place, counts: list[int]) -> dict[str, str]:
    rank, node, local, count = place
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(sum(counts)),
        "PMI_FD": "9",
        "PMI_HOSTNAME": f"n{node + 1}",
        "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(count),
    }


def _mvapich(place: Place, counts: list[int]) -> dict[str, str]:
    rank, _, local, count = place
    return {
        "MV2_COMM_WORLD_RANK": str(rank),
        "MV2_COMM_WORLD_SIZE": str(sum(counts)),
        "MV2_COMM_WORLD_LOCAL_RANK": str(local),
        "MV2_COMM_WORLD_LOCAL_SIZE": str(count),
    }


def _pals(place: Place, counts: list[int]) -> dict[str, str]:
    rank, node, local, count = place
    return {
        "PALS_APID": "00000000-0000-4000-8000-000000000000",
        "PALS_RANKID": str(rank),
        "PALS_NODEID": str(node),
        "PALS_LOCAL_RANKID": str(local),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(sum(counts)),
        "PMI_LOCAL_RANK": str(local),
        "PMI_LOCAL_SIZE": str(count),
    }


def _jsrun(place: Place, counts: list[int]) -> dict[str, str]:
    rank, _, local, count = place
    return {
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": str(sum(counts)),
        "JSM_NAMESPACE_LOCAL_RANK": str(local),
        "JSM_NAMESPACE_LOCAL_SIZE": str(count),
        "LSB_JOBID": "1000",
    }


def _flux(place: Place, counts: list[int]) -> dict[str, str]:
    rank, _, local, _ = place
    return {
        "FLUX_JOB_ID": "f1000",
        "FLUX_JOB_NNODES": str(len(counts)),
        "FLUX_JOB_SIZE": str(sum(counts)),
        "FLUX_TASK_LOCAL_ID": str(local),
        "FLUX_TASK_RANK": str(rank),
    }


def _slurm(place: Place, counts: list[int]) -> dict[str, str]:
    rank, node, local, count = place
    hosts = "n1" if len(counts) == 1 else f"n[1-{len(counts)}]"
    first = rank - local
    per_node = ",".join(map(str, counts))
    return {
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_GTIDS": ",".join(map(str, range(first, first + count))),
        "SLURM_JOB_ID": "1000",
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(len(counts)),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


def _single(place: Place, counts: list[int]) -> dict[str, str]:
    del place, counts
    return {}


_MAKERS: Mapping[str, Callable[[Place, list[int]], dict[str, str]]] = {
    "torchrun": _torchrun,
    "env": _env,
    "openmpi": _openmpi,
    "hydra": _hydra,
    "mvapich": _mvapich,
    "pals": _pals,
    "jsrun": _jsrun,
    "flux": _flux,
    "slurm": _slurm,
    "single": _single,
}
