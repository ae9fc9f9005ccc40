"""Transform a field whose rows are divided among two ranks: say which part of the spectrum each rank then holds.

Start with ``torchrun --master-port=29500 --nproc-per-node=2 transforms.py PEER [--rows 8]``.
"""

import argparse

import torch
import torch.distributed as dist


def spectrum(peer: str, field: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return what this rank holds of the spectrum, and how torch calls that."""
    if peer == "dtensor":
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        result = torch.fft.fft2(distribute_tensor(field, mesh, [Shard(0)]))
        return result.to_local(), str(result.placements)
    from distman import DistributedManager, split_sizes
    from distman.fft import fft2

    manager = DistributedManager.initialize()
    mine = field.split(split_sizes(len(field), manager.world_size))[manager.rank]
    return fft2(mine, shard_dim=0), "divided along the other dim"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["dtensor", "distman"])
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    try:
        local, how = spectrum(options.peer, torch.randn(options.rows, 6))
        print(f"{options.peer}: holds {tuple(local.shape)}, {how}", flush=True)
    except Exception as error:  # noqa: BLE001 - whatever the peer raises is the answer
        print(f"{options.peer}: {type(error).__name__}: {str(error).strip().splitlines()[0][:150]}", flush=True)
