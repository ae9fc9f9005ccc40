#!/bin/bash
# @{job}, on @{place}, under PBS.
# mpiexec of PALS (HPE Cray) starts one process @{unit}.
# Submit it:  qsub @{file}
#PBS -N @{name}
#PBS -l select=@{nodes}:ncpus=@{cpus_per_node}:mpiprocs=@{tasks}@{pbs_gpus}
#PBS -l walltime=@{time}
#PBS -j oe
# PBS may preempt the job, and then run it again from its start.
#PBS -r y
# Edit: one "#" less for what your cluster asks for.
#@{account_off}PBS -A @{account}
#@{partition_off}PBS -q @{partition}

set -euo pipefail
cd "$PBS_O_WORKDIR"

# Edit: what your program needs.
# module load python cuda
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take all of the node.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{cpus}}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=hsn0

@{several}# On several nodes a secret keeps others out of the job. It is drawn here, and handed on in the environment only.
@{several}DISTMAN_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
@{several}export DISTMAN_SECRET
@{several}
# PALS does not say where rank 0 runs, which is the first host of the job.
read -r MASTER_ADDR < "$PBS_NODEFILE"
export MASTER_ADDR

# When the time is up PBS sends SIGTERM, also to this script, which waits on. A training saves itself then, and ends
# with exit code 75: submit the same script again.
trap : TERM
mpiexec -n @{num_tasks} --ppn @{tasks} --depth @{cpus} --cpu-bind depth \
    @{program}
