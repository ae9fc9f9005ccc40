"""Jobs of the first ranks of a test, one after another: what some ranks save others load."""

import contextlib

import torch.distributed as dist

from distman import DistributedManager


@contextlib.contextmanager
def job(world_size, rank, store):
    """A job of the first ranks of this one, which has no process group."""
    file = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=world_size)
    DistributedManager.initialize()
    yield
    DistributedManager.cleanup(barrier=True)
    dist.destroy_process_group()
