"""Draw layers until a number of cases is reached, on 1 to 4 ranks and on 2 x 2: as the tests do, with other seeds.

python -m tests.domain.fuzz --cases 10000
"""

import argparse
import warnings

import torch

import distman
from distman import DistributedManager
from tests.domain.layers import KINDS, check_drawn_layer
from tests.domain.test_layers import one_dim, two_dims


def check(first, num_seeds, *, in_two_dims):
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
    torch.set_num_threads(1)
    manager = DistributedManager.initialize()
    if in_two_dims:
        manager.initialize_mesh((2, 2), ("rows", "columns"))
    for seed in range(first, first + num_seeds):
        for kind in KINDS:
            try:
                check_drawn_layer(kind, seed, manager.world_size, two_dims if in_two_dims else one_dim)
            except BaseException:
                print(f"{kind}, seed {seed}, {manager.world_size} ranks, in two dims: {in_two_dims}", flush=True)  # noqa: T201 - a program
                raise
    if manager.is_main:
        print(f"{num_seeds * len(KINDS)} layers on {manager.world_size} ranks, 2 x 2: {in_two_dims}", flush=True)  # noqa: T201 - a program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    arguments = parser.parse_args()
    num_seeds = -(-arguments.cases // (5 * len(KINDS)))
    for num_ranks, in_two_dims in ((1, False), (2, False), (3, False), (4, False), (4, True)):
        distman.run(check, arguments.first, num_seeds, n=num_ranks, in_two_dims=in_two_dims)


if __name__ == "__main__":
    main()
