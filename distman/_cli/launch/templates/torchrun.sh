#!/bin/bash
# @{job}, on @{place}. torchrun starts one process @{unit}.
# Run it@{torchrun_where}:  bash @{file}@{torchrun_first}
@{several}# The number is 0 on the node of that name, and 1, 2, ... on the others.
# One more argument is the port at which they meet, for two jobs at once:  bash @{file}@{torchrun_first} 29401

set -euo pipefail

@{several}first="${1:?the name of the node at which all meet}"
@{several}node="${2:?the number of this node, 0 at which all meet}"
@{several}port="${3:-29400}"
@{alone}first=localhost
@{alone}node=0
@{alone}port="${1:-29400}"

# Edit: what your program needs.
# module load python cuda
# source "$HOME/venv/bin/activate"

# As many threads as there are CPUs for each process; else each would take one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{cpus}}"

# NCCL finds its way alone, as a rule. Where the first collective hangs or is slow, let it say what it does; where it
# chose a network that does not reach the other nodes, name the right one ("ip -brief address" lists them).
# export NCCL_DEBUG=INFO
# export NCCL_SOCKET_IFNAME=ib0

@{several}# On several nodes a secret keeps others out of the job. This file holds it, for all your jobs: if the nodes do not
@{several}# share your home, copy it to each of them.
@{several}export DISTMAN_SECRET_FILE="${DISTMAN_SECRET_FILE:-$HOME/.distman_secret}"
@{several}if [ ! -e "$DISTMAN_SECRET_FILE" ]; then
@{several}    draft="$(mktemp "$DISTMAN_SECRET_FILE.XXXXXX")"
@{several}    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$draft"
@{several}    ln "$draft" "$DISTMAN_SECRET_FILE" 2>/dev/null || true # another node may have been faster
@{several}    rm "$draft"
@{several}fi
@{several}
# A training that is asked to stop (SIGTERM to one of these) saves itself and ends with exit code 75, of which torchrun
# makes 1: run the same command again.
# The rendezvous is static. Nodes that come and go (--nnodes=1:4) need --rdzv-backend=c10d, which has a price: every
# user and host that reaches an agent's port can run code as you.
torchrun --nnodes=@{nodes} --node-rank="$node" --nproc-per-node=@{tasks} --shutdown-timeout=120 \
    --rdzv-backend=static --master-addr="$first" --master-port="$port" --rdzv-id=@{name} \
    @{script}
