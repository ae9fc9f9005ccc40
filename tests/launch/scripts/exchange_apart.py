"""Exchange pieces where rank 1 is in namespaces of its own, and say to how many ranks this one is connected.

The arguments are the beginning of the command line by which rank 1 gets there.
"""

import os
import sys

IS_THERE = "RANK_1_IS_IN_ITS_NAMESPACES"


def main():
    import torch

    from distman import DistributedManager
    from distman.collectives import all_gather_v, fused_all_reduce
    from distman.collectives._transport import transport_of
    from distman.collectives._transport._segments import THRESHOLD
    from distman.collectives._validation import resolve_group

    manager = DistributedManager.initialize()
    for size in (1, THRESHOLD):
        full = all_gather_v(torch.full([size], manager.rank, dtype=torch.uint8))
        assert full[::size].tolist() == list(range(manager.world_size))
    assert fused_all_reduce(torch.tensor(1)) == manager.world_size
    connections = transport_of(resolve_group(None), torch.device("cpu")).connections()
    sys.stdout.write(f"rank {manager.rank}: connected to {len(connections.links)}\n")


if os.environ["RANK"] == "1" and IS_THERE not in os.environ:
    os.environ[IS_THERE] = "1"
    os.execvp(sys.argv[1], [*sys.argv[1:], sys.executable, __file__])  # noqa: S606 - this test starts it
main()
