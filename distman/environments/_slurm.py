"""Slurm: the tasks that srun starts.

The size is that of the step, never ``SLURM_NTASKS``, which a batch script sees too. The address is the first node of
the step: the allocation may begin elsewhere, and ``srun`` itself may run elsewhere.

Source:
    srun manual, section OUTPUT ENVIRONMENT VARIABLES; of the allocation, sbatch manual, the same section. Where it
    tracks processes by cgroups, it ends all of a step on a node with the last task there: seen with Slurm 22.05.
"""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import read_number, read_text
from distman.environments._hostlist import first_host, parse_hostlist, parse_tasks_per_node
from distman.environments._launcher import Allocation, Family, Launcher, OnFailure, Place

# Slurm's own steps have higher ids: the batch script, the shell of salloc, what runs outside of steps.
# Source: Slurm, slurm/slurm.h, SLURM_MAX_NORMAL_STEP_ID.
_MAX_STEP_ID = 0xFFFFFFF0
_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")  # of the allocation


def _why_not(environ: Mapping[str, str]) -> str | None:
    step = read_number(environ, *_STEP_ID)
    is_own = step is not None and step > _MAX_STEP_ID
    return "the step is Slurm's own (the shell of salloc, a batch script), not srun's" if is_own else None


def _expected_hosts(environ: Mapping[str, str]) -> list[str]:
    """Tell the hosts for block distribution, Slurm's default, where this node's tasks are those it would have."""
    nodes, tasks = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not nodes or not tasks or not environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    counts, node = parse_tasks_per_node(tasks), read_number(environ, "SLURM_NODEID")
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
    per_node, node = read_text(environ, "SLURM_STEP_TASKS_PER_NODE"), read_number(environ, "SLURM_NODEID")
    counts = parse_tasks_per_node(per_node) if per_node is not None else []
    return counts[node] if node is not None and node < len(counts) else None


def _first_node(environ: Mapping[str, str], *names: str) -> str | None:
    nodes = read_text(environ, *names)
    return None if nodes is None else first_host(nodes)


def _job_id(environ: Mapping[str, str]) -> str | None:
    """Name the step: two steps of one job may run side by side. The parts of a heterogeneous step share it."""
    job = read_text(environ, "SLURM_HET_JOB_ID", *_JOB_ID)
    return None if job is None else f"slurm-{job}.{read_number(environ, *_STEP_ID) or 0}"


def _cancel_command(environ: Mapping[str, str]) -> list[str]:
    job, step = read_text(environ, *_JOB_ID), read_text(environ, *_STEP_ID)
    return ["scancel", "--quiet", f"{job}.{step}"] if job is not None and step is not None else []


def _fake(place: Place) -> dict[str, str]:
    hosts = "n1" if place.num_nodes == 1 else f"n[1-{place.num_nodes}]"
    first = place.rank - place.local_rank
    return {
        "SLURMD_NODENAME": place.host,
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(place.num_nodes),
        "SLURM_NTASKS": str(place.world_size),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, place.counts)),
    }


_ALLOCATION = Allocation(
    name="slurm",
    title="Slurm",
    command="srun",
    fields={
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
        "num_nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        "main_address": _NODES,
        "job_id": _JOB_ID,
    },
    derived={"main_address": lambda environ: _first_node(environ, *_NODES), "job_id": _job_id},
)

SLURM = Launcher(
    name="slurm",
    family=Family.STEP,
    fields={
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS",),
        "local_rank": ("SLURM_LOCALID",),
        "local_world_size": ("SLURM_GTIDS", "SLURM_STEP_TASKS_PER_NODE"),
        "node_rank": ("SLURM_NODEID",),
        "num_nodes": ("SLURM_STEP_NUM_NODES",),
        "main_address": ("SLURM_STEP_NODELIST",),
        "job_id": _JOB_ID,
    },
    variables=("SLURM_*", "PMI_*", "PMIX_*"),
    on_failure=OnFailure.WAITS,
    marks=(_STEP_ID,),
    derived={
        "local_world_size": _local_world_size,
        "main_address": lambda environ: _first_node(environ, "SLURM_STEP_NODELIST"),
        "job_id": _job_id,
    },
    why_not=_why_not,
    allocation=_ALLOCATION,
    meets_on_first_node=True,
    expected_hosts=_expected_hosts,
    cancel_command=_cancel_command,
    # How slurmd has bound the task's GPUs: ``--gpus-per-task`` does it for each task, unless told otherwise.
    has_own_gpus=lambda environ: "gpu:per_task:" in environ.get("SLURMD_TRES_BIND", ""),
    uses_munge=True,
    ends_leftovers=True,
    fake=_fake,
)
