#!/bin/bash
# @{job}, on @{place}. mpiexec of MPICH or Intel MPI starts one process @{unit}.
# In a job of Slurm, PBS or LSF mpiexec knows the hosts:  bash @{file}
# Elsewhere name them; it reaches them by ssh:            bash @{file} node1,node2

set -euo pipefail

hosts="${1:-}"
options=(-n @{num_tasks} -ppn @{tasks})
if [ -n "$hosts" ]; then
    options+=(-hosts "$hosts")
fi

# Edit: what your program needs.
# module load python cuda mpich
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take all of the node.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{cpus}}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=ib0

# With mpi4py the ranks ask each other where to meet. Without it, name rank 0's host: the first; in a job, this one.
@{several}# On several nodes they need a secret too then, which keeps others out: it is handed on in the environment only.
if ! PYTHONSAFEPATH=1 python -c 'import mpi4py' 2>/dev/null; then # not from the current folder
    first="${hosts%%,*}"
    export MASTER_ADDR="${first:-$(hostname)}"
@{several}    DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
@{several}    export DISTMAN_SECRET
fi

# mpiexec hands SIGUSR1 on, by which a training is asked to stop. It saves itself and ends with exit code 75: run the
# same command again. mpiexec hands all variables on to the other hosts.
mpiexec "${options[@]}" \
    @{program}
