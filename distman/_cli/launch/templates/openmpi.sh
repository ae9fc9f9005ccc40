#!/bin/bash
# @{job}, on @{place}. mpirun of Open MPI 4 or 5 starts one process @{unit}.
# In a job of Slurm, PBS or LSF mpirun knows the hosts:  bash @{file}
# Elsewhere name them; it reaches them by ssh:           bash @{file} node1,node2

set -euo pipefail

hosts="${1:-}"
# Bound to one core, as is the default, a process could not use its threads.
options=(-np @{num_tasks} --map-by ppr:@{tasks}:node --bind-to none)
if [ -n "$hosts" ]; then
    options+=(--host "${hosts//,/:@{tasks},}:@{tasks}")
fi

# Edit: what your program needs.
# module load python cuda openmpi
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take all of the node.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{cpus}}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# options+=(-x NCCL_DEBUG=INFO)
# options+=(-x NCCL_SOCKET_IFNAME=ib0)

# With mpi4py the ranks ask each other where to meet. Without it, name rank 0's host: the first; in a job, this one.
@{several}# On several nodes they need a secret too then, which keeps others out: it is handed on in the environment only.
if ! PYTHONSAFEPATH=1 python -c 'import mpi4py' 2>/dev/null; then # not from the current folder
    first="${hosts%%,*}"
    options+=(-x "MASTER_ADDR=${first:-$(hostname)}")
@{several}    DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
@{several}    export DISTMAN_SECRET
@{several}    options+=(-x DISTMAN_SECRET)
fi

# mpirun hands SIGUSR1 on, by which a training is asked to stop. It saves itself and ends with exit code 75: run the
# same command again. -x hands a variable on to the other hosts.
mpirun "${options[@]}" -x PATH -x OMP_NUM_THREADS \
    @{program}
