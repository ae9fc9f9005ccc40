#!/bin/bash
# A job of 8 processes, on 2 nodes with 4 GPUs each, under PBS.
# mpiexec of PALS (HPE Cray) starts one process for each GPU.
# Submit it:  qsub pbs.sh
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l walltime=24:00:00
#PBS -j oe
# PBS may preempt the job, and then run it again from its start.
#PBS -r y
# Edit: one "#" less for what your cluster asks for.
##PBS -A ACCOUNT
##PBS -q PARTITION

set -euo pipefail
cd "$PBS_O_WORKDIR"

# Edit: what your program needs.
# module load python cuda
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take all of the node.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=hsn0

# On several nodes a secret keeps others out of the job. It is drawn here, and handed on in the environment only.
DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export DISTMAN_SECRET

# PALS does not say where rank 0 runs, which is the first host of the job.
read -r MASTER_ADDR < "$PBS_NODEFILE"
export MASTER_ADDR

# When the time is up PBS sends SIGTERM, also to this script, which waits on. A training saves itself then, and ends
# with exit code 75: submit the same script again.
trap : TERM
mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth \
    python train.py
