"""Every layer on blocks, with first and second derivatives, against torch on the full field in double precision."""

import pytest

from distman import DistributedManager
from distman.testing import ranks
from tests.domain.layers import KINDS, check_drawn_layer

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 3, 4)
def test_one_split_dim(world_size, kind):
    for seed in range(12):
        check_drawn_layer(kind, seed, world_size, lambda num, draw: {draw.randint(-num, -1): "world"})


@pytest.mark.parametrize("kind", KINDS)
@ranks(4)
def test_two_split_dims(world_size, kind):
    DistributedManager().initialize_mesh((2, 2), ("rows", "columns"))

    def dims_of(num, draw):
        if num == 1:
            return {-1: "rows"}
        first, second = draw.sample(range(-num, 0), 2)
        return {first: "rows", second: "columns"}

    for seed in range(12):
        check_drawn_layer(kind, seed, world_size, dims_of)
