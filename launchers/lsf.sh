#!/bin/bash
# A job of 8 processes, on 2 nodes with 4 GPUs each, under LSF. jsrun starts one process for each GPU.
# Submit it:  bsub < lsf.sh
#BSUB -J train
#BSUB -nnodes 2
#BSUB -W 24:00
#BSUB -o %J.log
# Two minutes before the time is up every process gets SIGTERM. Exit code 75 queues the job again.
#BSUB -wa TERM
#BSUB -wt 2
#BSUB -r
#BSUB -Q 75
# Edit: one "#" less for what your cluster asks for.
##BSUB -P ACCOUNT
##BSUB -q PARTITION

set -euo pipefail

# Edit: what your program needs.
# module load python cuda
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take all of the node.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=ib0

# On several nodes a secret keeps others out of the job. It is drawn here, and handed on in the environment only.
DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export DISTMAN_SECRET

# jsrun does not say where rank 0 runs. This script may run on a node without ranks, so ask the first one.
MASTER_ADDR="$(jsrun --nrs 1 --tasks_per_rs 1 --cpu_per_rs 1 hostname)"
export MASTER_ADDR

# The signal comes to this script too, which waits on. A training that was asked to stop saves itself and ends with exit
# code 75; the next run goes on from there.
trap : TERM

# One resource set for each node, so that its processes see each other's GPUs.
jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 4 --cpu_per_rs 32 --gpu_per_rs 4 \
    --bind packed:8 \
    python train.py
