#!/bin/bash
# A job of 8 processes, on 2 nodes with 4 GPUs each. srun starts one process for each GPU.
# Submit it:  sbatch slurm_many_nodes.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Two minutes before the time is up every process gets SIGTERM. The job may run again, and adds to the same log.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Edit: one "#" less for what your cluster asks for.
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
##SBATCH --mem-per-cpu=4G

set -euo pipefail

# Edit: what your program needs.
# module load python cuda
# source "$HOME/venv/bin/activate"

# As many threads as the scheduler gave each process CPUs; else each would take all of the node. srun wants to be told.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# A training that was asked to stop (SIGTERM) saves itself and queues the job again; the second run goes on from there.
# It ends with exit code 75, which here means: not finished, not failed.
export DISTMAN_REQUEUE=1

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=ib0

# The ranks find each other: no MASTER_ADDR, no port. When one dies, srun ends the others.
srun --kill-on-bad-exit=1 \
    python train.py
