#!/bin/bash
# @{job}, on @{place}.
# srun starts one torchrun on each node, which starts one process @{unit}. Without a
# reason for torchrun, such as restarts in place, srun alone is simpler.
# Submit it:  sbatch @{file}
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@{typed_gpus}
#SBATCH --cpus-per-task=@{cpus_per_node}
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

# As many threads as there are CPUs for each process, of which Slurm knows nothing here.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{cpus}}"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# A training that was asked to stop (SIGTERM) saves itself and queues the job again; the second run goes on from there.
# It ends with exit code 75, which torchrun calls a failure: ignore its words about that.
export DISTMAN_REQUEUE=1

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=ib0

@{several}# On several nodes a secret keeps others out of the job. It is drawn here, and handed on in the environment only.
@{several}DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
@{several}export DISTMAN_SECRET
@{several}
# The torchruns meet on the first node, at a port of this job's own.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((10000 + SLURM_JOB_ID % 13000))

# torchrun hands the signal on, and waits for two minutes. When one of them dies, srun ends the others.
# The rendezvous is static. Nodes that come and go (--nnodes=1:4) need --rdzv-backend=c10d, which has a price: every
# user and host that reaches an agent's port can run code as you.
@{several}# shellcheck disable=SC2016 # the variable is that of each task
srun --kill-on-bad-exit=1 \
@{alone}    torchrun --nnodes=1 --nproc-per-node=@{tasks} --shutdown-timeout=120 \
@{several}    bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' torchrun \
@{several}    --nnodes=@{nodes} --nproc-per-node=@{tasks} --shutdown-timeout=120 \
    --rdzv-backend=static --master-addr="${hosts[0]}" --master-port="$port" --rdzv-id="$SLURM_JOB_ID" \
    @{script}
