#!/bin/bash
# @{job}, on @{place}. srun starts one process @{unit}.
# Submit it:  sbatch @{file}
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{all_nodes}
@{kept}# The allocation outlives a node that fails, and distman keep starts the job again without it.
@{kept}#SBATCH --no-kill
#SBATCH --ntasks-per-node=@{tasks}
#SBATCH --gpus-per-node=@{typed_gpus}
#SBATCH --cpus-per-task=@{cpus}
#SBATCH --time=@{time}
#SBATCH --output=%x-%j.log
# Two minutes before the time is up every process gets SIGTERM. The job may run again, and adds to the same log.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Edit: one "#" less for what your cluster asks for.
#@{account_off}SBATCH --account=@{account}
#@{partition_off}SBATCH --partition=@{partition}
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
@{keep}srun --kill-on-bad-exit=1 \
    @{program}
