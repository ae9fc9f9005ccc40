"""The launchers that distman knows, but for Slurm: what each of them sets, and what it does."""

from __future__ import annotations

import re

from distman.environments._base import Environ, read_number, read_text
from distman.environments._launcher import Agent, Family, Launcher, OnFailure, Place

_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"  # the variable that only the elastic agent sets
_TORCHRUN_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_TORCHRUN_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# What torchrun draws with ``--standalone`` and, on one node, without a port or a rendezvous: both mean c10d.
_TORCHRUN_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DISTMAN_ID = "DISTMAN_RUN_ID"  # names one start of the ranks
_OPENMPI_LAUNCH_NODE = "OMPI_MCA_orte_hnp_uri"
_IPV4 = re.compile(r"tcp4?://(\d+\.\d+\.\d+\.\d+)")
_SUBMITIT_TASKS = "SUBMITIT_LOCAL_NTASKS"
_WITHIN_SUBMITIT = ("SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")

# Bare RANK and WORLD_SIZE: torch.distributed.launch, Kubeflow, DeepSpeed, or set by hand. How many nodes there are, and
# which this is, goes by too many names to be read here: the ranks find it out when they meet.
# Source: PyTorch documentation, torch.distributed, Environment variable initialization.
BARE = Launcher(
    name="env",
    family=Family.ENV,
    fields={
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "main_address": ("MASTER_ADDR",),
        "main_port": ("MASTER_PORT",),
    },
    variables=("NODE_RANK",),
    on_failure=OnFailure.WAITS,
    fake=lambda _place: {"MASTER_PORT": ""},  # some set one, but not all
)


def is_complete(environ: Environ) -> bool:
    """Return whether ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are all set, as a launcher sets them."""
    return all(environ.get(name, "").strip() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def _torchrun_serves(environ: Environ) -> bool:
    return environ.get(_TORCHRUN_STORE) == "True"


# torchrun and every other front end of torch.distributed.elastic.
# Source: PyTorch documentation, torchrun, section Environment Variables.
TORCHRUN = Launcher(
    name="torchrun",
    family=Family.ENV,
    fields={
        **BARE.fields,
        "node_rank": ("GROUP_RANK",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
        "job_id": (_TORCHRUN_ID,),
    },
    variables=("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_*"),
    on_failure=OnFailure.ENDS_JOB,
    marks=((_TORCHRUN_ID,),),
    agent=Agent(
        is_serving=_torchrun_serves,
        may_be_safe=lambda environ, job_id: _torchrun_serves(environ) and not _TORCHRUN_UUID.fullmatch(job_id),
        restart_count=_TORCHRUN_RESTARTS,
    ),
    may_bind_gpus=False,
    fake=lambda _place: {_TORCHRUN_ID: "fake", _TORCHRUN_RESTARTS: "0", _TORCHRUN_STORE: "True"},
)

# ``distman run``: the ranks of a job on this machine, started by this package.
DISTMAN_RUN = Launcher(
    name="distman-run",
    family=Family.ENV,
    fields={**BARE.fields, "job_id": (_DISTMAN_ID,)},
    variables=(),
    on_failure=OnFailure.ENDS_JOB,
    marks=((_DISTMAN_ID,),),
    may_bind_gpus=False,
    shows_errors=True,
)


def _openmpi_launch_node(environ: Environ) -> str | None:
    local = read_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if local is not None and local == read_number(environ, "OMPI_COMM_WORLD_SIZE"):
        return None
    match = _IPV4.search(read_text(environ, _OPENMPI_LAUNCH_NODE) or "")
    return match[1] if match else None


# Open MPI 4 and 5: mpirun and mpiexec. ``OMPI_COMM_WORLD_NODE_RANK`` is not read: it is the rank within the node.
# Version 4 tells the host of ``mpirun``, which is taken for rank 0's host in a job of several nodes; version 5 none.
# Source: Open MPI documentation, Environment variables set for MPI applications.
OPENMPI = Launcher(
    name="openmpi",
    family=Family.MPI,
    fields={
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "main_address": (_OPENMPI_LAUNCH_NODE,),
        "job_id": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    },
    variables=("OMPI_*", "PMIX_*", "PRTE_*"),
    on_failure=OnFailure.ENDS_JOB,
    derived={"main_address": _openmpi_launch_node},
    process_names=("mpiexec", "mpirun"),
    fake=lambda place: {
        _OPENMPI_LAUNCH_NODE: "",
        "OMPI_COMM_WORLD_NODE_RANK": str(place.local_rank),
        "PMIX_HOSTNAME": place.host,
        "PMIX_NAMESPACE": "prterun-n1-1000@1",
        "PMIX_RANK": str(place.rank),
    },
)

# Hydra: mpiexec of MPICH and of Intel MPI. ``PMI_RANK`` alone proves nothing: ``srun --mpi=pmi2`` and PALS set it too.
# Source: MPICH wiki, Using the Hydra Process Manager; recorded from MPICH 4 and 5 and Intel MPI 2021.
HYDRA = Launcher(
    name="hydra",
    family=Family.MPI,
    fields={
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_world_size": ("MPI_LOCALNRANKS",),
        "job_id": ("I_MPI_HYDRA_UUID",),
    },
    variables=("HYDRA_*", "I_MPI_*", "MPIR_*", "MPI_*", "PMI_*"),
    on_failure=OnFailure.NEEDS_ABORT,
    marks=(("MPI_LOCALRANKID",),),
    process_names=("hydra_pmi_proxy", "hydra_bstrap_pro", "mpiexec", "mpirun"),
    # Only Intel MPI names the job.
    fake=lambda place: {"PMI_FD": "9", "PMI_HOSTNAME": place.host, "I_MPI_HYDRA_UUID": ""},
)

# MVAPICH started by its own mpirun_rsh; its mpiexec is Hydra. MVAPICH 3 writes ``MVP_``, MVAPICH2 ``MV2_``.
# Source: MVAPICH2, src/pm/mpirun/src/mpispawn.c, setup_global_environment and setup_local_environment.
MVAPICH = Launcher(
    name="mvapich",
    family=Family.MPI,
    fields={
        "rank": ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        "world_size": ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        "local_world_size": ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        "node_rank": ("MV2_NODE_ID", "MVP_NODE_ID"),
        "num_nodes": ("MV2_NUM_NODES_IN_JOB", "MVP_NUM_NODES_IN_JOB"),
        "job_id": ("MPIRUN_ID",),
    },
    variables=("MV2_*", "MVP_*", "MPIRUN_*", "PMI_*"),
    on_failure=OnFailure.NEEDS_ABORT,
    process_names=("mpiexec", "mpirun"),
)

# PALS: mpiexec and aprun of HPE Cray systems under PBS. Slurm and Flux set the same variables on Cray systems, for
# Cray's MPI to find, and say more themselves.
# Source: HPE Cray PALS, mpiexec(1), section ENVIRONMENT VARIABLES.
PALS = Launcher(
    name="pals",
    family=Family.MPI,
    fields={
        "rank": ("PALS_RANKID",),
        "world_size": ("PALS_SIZE", "PMI_SIZE"),
        "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "local_world_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        "node_rank": ("PALS_NODEID",),
        "job_id": ("PALS_APID",),
    },
    variables=("PALS_*", "PMI_*"),
    on_failure=OnFailure.WAITS,
    imitated_by=("flux", "slurm"),
    process_names=("mpiexec", "mpirun"),
    fake=lambda place: {
        "PALS_APID": "00000000-0000-4000-8000-000000000000",
        "PALS_SIZE": "",
        "PALS_LOCAL_SIZE": "",
        "PMI_RANK": str(place.rank),
        "PMI_SIZE": str(place.world_size),
        "PMI_LOCAL_RANK": str(place.local_rank),
        "PMI_LOCAL_SIZE": str(place.local_world_size),
    },
)


def _why_not_submitit(environ: Environ) -> str | None:
    """A single task may start the ranks of another launcher, which inherit its variables."""
    if read_text(environ, _SUBMITIT_TASKS) != "1":
        return None
    inner = next((name for name in _WITHIN_SUBMITIT if read_text(environ, name) not in (None, "1")), None)
    return None if inner is None else f"its one task has started more ({inner}={read_text(environ, inner)})"


# submitit's local executor, which starts tasks on this machine; under Slurm its tasks are those of a step.
# Source: submitit, submitit/local/local.py, LocalJobEnvironment.
SUBMITIT = Launcher(
    name="submitit",
    family=Family.STEP,
    fields={
        "rank": ("SUBMITIT_LOCAL_GLOBALID",),
        "world_size": (_SUBMITIT_TASKS,),
        "local_rank": ("SUBMITIT_LOCAL_LOCALID",),
        "node_rank": ("SUBMITIT_LOCAL_NODEID",),
        "num_nodes": ("SUBMITIT_LOCAL_JOB_NUM_NODES",),
        "job_id": ("SUBMITIT_LOCAL_JOB_ID",),
    },
    variables=("SUBMITIT_*",),
    on_failure=OnFailure.WAITS,
    why_not=_why_not_submitit,
    may_bind_gpus=False,
)


def _jsrun_job_id(environ: Environ) -> str | None:
    """Name the job step: the name space of PMIx tells two steps of one LSF job apart."""
    job, step = read_text(environ, "LSB_JOBID"), read_text(environ, "PMIX_NAMESPACE")
    return job if job is None or step is None else f"{job}.{step}"


def _jsrun_first_host(environ: Environ) -> str | None:
    """Return the first host of the allocation that runs tasks: a launch node comes before, with one slot, not many."""
    words = (read_text(environ, "LSB_MCPU_HOSTS") or "").split()
    hosts, slots = words[::2], words[1::2]
    has_launch_node = slots[:1] == ["1"] and len(hosts) > 1 and slots[1:2] != ["1"]
    return next(iter(hosts[has_launch_node:]), None)


def _fake_jsrun(place: Place) -> dict[str, str]:
    slots = " ".join(f"n{node + 1} {count}" for node, count in enumerate(place.counts))
    return {"LSB_MCPU_HOSTS": f"launch1 1 {slots}" if min(place.counts) > 1 else slots}


# jsrun: the job step manager of IBM LSF. It does not say where rank 0 runs: by default that is LSF's first host.
# Source: IBM Job Step Manager, jsrun, section Environment variables; IBM Spectrum LSF, Environment variables set for
# job execution, LSB_MCPU_HOSTS, which has the hosts of LSB_DJOB_RANKFILE, but need not be opened on each host.
JSRUN = Launcher(
    name="jsrun",
    family=Family.STEP,
    fields={
        "rank": ("JSM_NAMESPACE_RANK",),
        "world_size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_world_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
        "main_address": ("LSB_MCPU_HOSTS",),
        "job_id": ("LSB_JOBID",),
    },
    variables=("JSM_*", "PMIX_*"),
    on_failure=OnFailure.WAITS,
    derived={"main_address": _jsrun_first_host, "job_id": _jsrun_job_id},
    fake=_fake_jsrun,
)

# Flux: flux run and flux submit. It does not say where rank 0 runs.
# Source: flux-environment(7), section Task environment.
FLUX = Launcher(
    name="flux",
    family=Family.STEP,
    fields={
        "rank": ("FLUX_TASK_RANK",),
        "world_size": ("FLUX_JOB_SIZE",),
        "local_rank": ("FLUX_TASK_LOCAL_ID",),
        "num_nodes": ("FLUX_JOB_NNODES",),
        "job_id": ("FLUX_JOB_ID",),
    },
    variables=("FLUX_*", "PMI_*"),
    on_failure=OnFailure.WAITS,
    fake=lambda place: {"FLUX_JOB_ID": f"f{place.job_id}"},  # letters and digits after an f
)

# No launcher: one process.
SINGLE = Launcher(name="single", family=Family.NONE, fields={}, variables=(), on_failure=OnFailure.ENDS_JOB)
