"""MVAPICH started by its own mpirun_rsh; its mpiexec is Hydra.

MVAPICH 3 spells its variables ``MVP_``, MVAPICH2 ``MV2_``.

Source:
    MVAPICH2, ``src/pm/mpirun/src/mpispawn.c``, setup_global_environment and setup_local_environment.
"""

from __future__ import annotations

from distman.environments._launcher import Family, Launcher, OnFailure

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
