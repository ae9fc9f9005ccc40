"""The example of physicsnemo's manual, with another import line, where a GPU is not needed.

Of the rest only this differs: the network is torch's, the stream and the device ids are for GPUs alone, and a name that
the manual has misspelt is right.
"""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from distman.compat.physicsnemo import DistributedManager


def main():
    DistributedManager.initialize()
    dist = DistributedManager()

    arch = torch.nn.Linear(32, 64).to(dist.device)

    if dist.distributed:
        if dist.cuda:
            ddps = torch.cuda.Stream()
            with torch.cuda.stream(ddps):
                arch = DistributedDataParallel(
                    arch,
                    device_ids=[dist.local_rank],
                    output_device=dist.device,
                    broadcast_buffers=dist.broadcast_buffers,
                    find_unused_parameters=dist.find_unused_parameters,
                )
            torch.cuda.current_stream().wait_stream(ddps)
        else:
            arch = DistributedDataParallel(
                arch,
                broadcast_buffers=dist.broadcast_buffers,
                find_unused_parameters=dist.find_unused_parameters,
            )

    optimizer = torch.optim.Adam(
        arch.parameters(),
        lr=0.001,
    )

    def training_step(input, target):
        pred = arch(input)
        loss = torch.sum(torch.pow(pred - target, 2))
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(20):
        input = torch.randn(128, 32, device=dist.device)
        target = torch.randn(128, 64, device=dist.device)
        loss = training_step(input, target)

    weights = sum(parameter.sum() for parameter in arch.parameters()).item()
    # Not print: without a buffer it writes the end of a line by itself, behind what another rank writes meanwhile.
    sys.stdout.write(f"{dist.rank} of {dist.world_size}: {weights:.9f} {torch.isfinite(loss).item()}\n")


if __name__ == "__main__":
    main()
