"""Every layer on blocks, with first and second derivatives, against torch on the full field in double precision.

`python -m tests.domain.fuzz` draws many more.
"""

import pytest
import torch.distributed as dist

from distman import DistributedManager
from distman.testing import ranks
from tests.domain.layers import KINDS, check_drawn_layer

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def one_dim(num, draw):
    return {draw.randint(-num, -1): "world"}


def two_dims(num, draw):
    if num == 1:
        return {-1: "rows"}
    first, second = draw.sample(range(-num, 0), 2)
    return {first: "rows", second: "columns"}


def num_drawn():
    """Layers of a kind: of other backends a few show that they carry what these exchange."""
    return 8 if dist.get_backend() == "gloo" else 2


@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 3, 4)
def test_one_split_dim(world_size, kind):
    for seed in range(num_drawn()):
        check_drawn_layer(kind, seed, world_size, one_dim)


@pytest.mark.parametrize("kind", KINDS)
@ranks(4)
def test_two_split_dims(world_size, kind):
    DistributedManager().initialize_mesh((2, 2), ("rows", "columns"))
    for seed in range(num_drawn()):
        check_drawn_layer(kind, seed, world_size, two_dims)
