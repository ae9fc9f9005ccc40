"""Slurm: the tasks that srun starts."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment, read_index, read_text
from distman.environments._fields import Fields, environment_from
from distman.environments._hostlist import first_host, parse_hostlist, parse_tasks_per_node

_MAX_STEP_ID = 0xFFFFFFF0
"""Slurm's own steps have higher ids: the batch script, the shell of salloc, what runs outside of steps."""

_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")

FIELDS: Fields = {
    "rank": ("SLURM_PROCID",),
    "world_size": ("SLURM_STEP_NUM_TASKS",),
    "local_rank": ("SLURM_LOCALID",),
    "local_world_size": ("SLURM_GTIDS", "SLURM_STEP_TASKS_PER_NODE"),
    "node_rank": ("SLURM_NODEID",),
    "num_nodes": ("SLURM_STEP_NUM_NODES",),
    "main_address": ("SLURM_STEP_NODELIST",),
    "job_id": _JOB_ID,
}

ALLOCATION_FIELDS: Fields = {
    "rank": ("SLURM_PROCID",),
    "world_size": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "local_rank": ("SLURM_LOCALID",),
    "node_rank": ("SLURM_NODEID",),
    "num_nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "main_address": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "job_id": _JOB_ID,
}


def from_slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what ``srun`` says about this process, or None outside a job step.

    The size is that of the step, never ``SLURM_NTASKS``, which a batch script sees too. The address is
    the first node of the step: the allocation may begin elsewhere, and ``srun`` itself may run elsewhere.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        srun manual, section OUTPUT ENVIRONMENT VARIABLES.
    """
    if not is_step(environ):
        return None
    return environment_from(
        "slurm",
        FIELDS,
        environ,
        local_world_size=_local_world_size(environ),
        main_address=_first(environ, "SLURM_STEP_NODELIST"),
        job_id=_job_id(environ),
    )


def from_slurm_allocation(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what the variables of a whole allocation say, for a process that is told to believe them.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        sbatch manual, section OUTPUT ENVIRONMENT VARIABLES.
    """
    address = _first(environ, "SLURM_JOB_NODELIST") or _first(environ, "SLURM_NODELIST")
    return environment_from("slurm", ALLOCATION_FIELDS, environ, main_address=address, job_id=_job_id(environ))


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether the variables name a step of ``srun``, and none of Slurm's own.

    Raises:
        LaunchEnvironmentError: The step id is not a number.

    Source:
        Slurm, ``slurm/slurm.h``, SLURM_MAX_NORMAL_STEP_ID.
    """
    step = read_index(environ, *_STEP_ID)
    return step is not None and step <= _MAX_STEP_ID


def is_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in an allocation, but not as a task that ``srun`` started."""
    return read_text(environ, *_JOB_ID) is not None and from_slurm(environ) is None


def expected_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the host of each rank of this step, in rank order; empty where that cannot be told.

    Local. It can for block distribution, Slurm's default, where this node's tasks are those it would have.

    Raises:
        LaunchEnvironmentError: The node list or the numbers of tasks have no meaning.
    """
    nodes, tasks = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not nodes or not tasks or not environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    counts, node = parse_tasks_per_node(tasks), read_index(environ, "SLURM_NODEID")
    if node is None or node >= len(counts):
        return []
    first = sum(counts[:node])
    tasks_here = ",".join(map(str, range(first, first + counts[node])))
    hosts = [host for host, count in zip(parse_hostlist(nodes), counts, strict=False) for _ in range(count)]
    return hosts if environ.get("SLURM_GTIDS") == tasks_here else []


def _local_world_size(environ: Mapping[str, str]) -> int | None:
    tasks_here = read_text(environ, "SLURM_GTIDS")
    if tasks_here is not None:
        return len(tasks_here.split(","))
    per_node, node = read_text(environ, "SLURM_STEP_TASKS_PER_NODE"), read_index(environ, "SLURM_NODEID")
    counts = parse_tasks_per_node(per_node) if per_node is not None else []
    return counts[node] if node is not None and node < len(counts) else None


def _first(environ: Mapping[str, str], name: str) -> str | None:
    nodes = read_text(environ, name)
    return None if nodes is None else first_host(nodes)


def _job_id(environ: Mapping[str, str]) -> str | None:
    """Name the step: two steps of one job may run side by side. The parts of a heterogeneous step share it."""
    job = read_text(environ, "SLURM_HET_JOB_ID", *_JOB_ID)
    return None if job is None else f"slurm-{job}.{read_index(environ, *_STEP_ID) or 0}"
