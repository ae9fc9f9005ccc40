#!/bin/bash
# A job of 8 processes, on 2 nodes with 4 GPUs each, under Flux. flux run starts one process for each GPU.
# Submit it:  flux batch flux.sh
# flux: --job-name=train
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=8
# flux: --gpus-per-slot=1
# flux: --time-limit=1440m
# flux: --output={{name}}-{{id}}.log
# Edit: one "#" less for what your cluster asks for.
# flux: #--bank=ACCOUNT
# flux: #--queue=PARTITION

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

# Flux does not say where rank 0 runs: on the first node, which is this one.
MASTER_ADDR="$(hostname)"
export MASTER_ADDR

# Two minutes before the time is up every process gets SIGTERM. A training saves itself then, and ends with exit code
# 75: submit the same script again.
flux run --nodes=2 --ntasks=8 --cores-per-task=8 --signal=SIGTERM@120s \
    --gpus-per-task=1 \
    python train.py
