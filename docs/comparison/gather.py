"""Gather shards of one and two rows on two ranks, and ask for gradients: say what comes back.

Start with ``torchrun --master-port=29500 --nproc-per-node=2 gather.py PEER``. Each row is its rank + 1: the full
tensor is [1, 2, 2]. The loss weighs its rows by 1, 2, 3, on both ranks, so the gradient is [2] on rank 0 and [4, 6] on
rank 1.
"""

import argparse
import os

import torch
import torch.distributed as dist


def gathered(peer: str, shard: torch.Tensor) -> torch.Tensor:
    """Return the full tensor."""
    if peer == "torch":
        import torch.distributed.nn.functional as functional

        return torch.cat(functional.all_gather(shard))
    if peer == "dtensor":
        from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        full = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=(3, 1), stride=(1, 1))
        return full.full_tensor(grad_placements=[Partial()])
    if peer == "accelerate":
        from accelerate.utils import gather, pad_across_processes

        return gather(pad_across_processes(shard))
    if peer == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        return fabric.all_gather(shard, sync_grads=True)
    if peer == "physicsnemo":
        from physicsnemo.distributed import DistributedManager
        from physicsnemo.distributed.autograd import all_gather_v

        DistributedManager.initialize()
        return all_gather_v(shard, sizes=[1, 2], dim=0)
    from distman import DistributedManager
    from distman.collectives import all_gather_v

    DistributedManager.initialize()
    return all_gather_v(shard)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["torch", "dtensor", "accelerate", "fabric", "physicsnemo", "distman"])
    parser.add_argument("--sizes", nargs=2, type=int, default=[1, 2], help="rows on rank 0 and on rank 1")
    options = parser.parse_args()
    peer = options.peer
    if peer in ("torch", "dtensor"):
        dist.init_process_group("gloo")
    elif peer == "accelerate":
        from accelerate import PartialState

        PartialState(cpu=True)
    rank = int(os.environ["RANK"])
    shard = torch.full((options.sizes[rank], 1), rank + 1.0, requires_grad=True)
    try:
        full = gathered(peer, shard)
        text = f"full {full.flatten().tolist()}"
        if full.requires_grad and full.numel() == 3:
            (full * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
            text += f", gradient {shard.grad.flatten().tolist()}"
        else:
            text += f", requires_grad {full.requires_grad}"
    except Exception as error:  # noqa: BLE001 - whatever the peer raises is the answer
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    print(f"{peer}, rank {rank}: {text}", flush=True)
