#!/bin/bash
# @{job}, on @{place}, under Flux. flux run starts one process @{unit}.
# Submit it:  flux batch @{file}
# flux: --job-name=@{name}
# flux: --nodes=@{nodes}
# flux: --nslots=@{num_tasks}
# flux: --cores-per-slot=@{cpus}
# flux: --gpus-per-slot=@{gpus_per_task}
# flux: --time-limit=@{minutes}m
# flux: --output={{name}}-{{id}}.log
# Edit: one "#" less for what your cluster asks for.
# flux: @{account_off}--bank=@{account}
# flux: @{partition_off}--queue=@{partition}

set -euo pipefail

# Edit: what your program needs.
# module load python cuda
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take all of the node.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{cpus}}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=ib0

@{several}# On several nodes a secret keeps others out of the job. It is drawn here, and handed on in the environment only.
@{several}DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
@{several}export DISTMAN_SECRET
@{several}
# Flux does not say where rank 0 runs: on the first node, which is this one.
MASTER_ADDR="$(hostname)"
export MASTER_ADDR

# Two minutes before the time is up every process gets SIGTERM. A training saves itself then, and ends with exit code
# 75: submit the same script again.
flux run --nodes=@{nodes} --ntasks=@{num_tasks} --cores-per-task=@{cpus} --signal=SIGTERM@120s \
    --gpus-per-task=@{gpus_per_task} \
    @{program}
