"""Read five samples on two ranks for evaluation, with the peer's own loader: say which samples count.

Start with ``torchrun --master-port=29500 --nproc-per-node=2 evaluation.py PEER``.
"""

import argparse
import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

SAMPLES = list(range(5))


def samples_of(peer: str) -> list[Iterable[torch.Tensor]]:
    """Return what this rank would count."""
    if peer == "torch":
        dist.init_process_group("gloo")
        return [DataLoader(SAMPLES, batch_size=2, sampler=DistributedSampler(SAMPLES, shuffle=False))]
    if peer == "accelerate":
        from accelerate import Accelerator

        return [Accelerator(cpu=True).prepare(DataLoader(SAMPLES, batch_size=2))]
    if peer == "accelerate-gathered":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        batches = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(DataLoader(SAMPLES, 2))]
        return [batches] if accelerator.is_main_process else [[]]
    if peer == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        return [fabric.setup_dataloaders(DataLoader(SAMPLES, batch_size=2))]
    from distman import DistributedManager
    from distman.data import distributed_loader

    DistributedManager.initialize()
    return [distributed_loader(SAMPLES, batch_size=2, evaluation=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["torch", "accelerate", "accelerate-gathered", "fabric", "distman"])
    peer = parser.parse_args().peer
    mine = [sample for batches in samples_of(peer) for batch in batches for sample in batch.tolist()]
    everybody = [None, None]
    dist.all_gather_object(everybody, mine)
    if dist.get_rank() == 0:
        print(f"{peer}: ranks count {everybody}, {sum(map(len, everybody))} in all")
    dist.barrier()
    with contextlib.suppress(AssertionError):
        dist.destroy_process_group()
