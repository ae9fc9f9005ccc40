"""Groups of large worlds, on one rank of a simulated one: right ranks, and no more groups than the rank is in."""

import math
from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distman import DistributedManager, ProcessGroupConfig, ProcessGroupNode
from distman._base.process_state import reset

SHAPES = [(16, 8, 8), (256, 8, 8), (1024, 8, 8)]
AXES = ("data", "spatial", "channel")
PLACES = [0.0, 0.61, 1.0]  # of the rank in its world
MOST = 2  # groups that a rank may make for each that it is in


class World:
    """One rank of a world that is simulated.

    Attributes:
        made: How often the making of a process group was asked for.
    """

    def __init__(self, shape, place):
        self.shape = shape
        self.size = math.prod(shape)
        self.rank = int(place * (self.size - 1))
        self.ranks = np.arange(self.size).reshape(shape)
        self.made = Counter()

    def expected(self):
        """Return the ranks of this rank's groups, by their names."""
        data, spatial, channel = np.unravel_index(self.rank, self.shape)
        return {
            "data": self.ranks[:, spatial, channel],
            "model": self.ranks[data].ravel(),
            "spatial": self.ranks[data, :, channel],
            "channel": self.ranks[data, spatial],
        }


@pytest.fixture(params=[(shape, place) for shape in SHAPES for place in PLACES], ids=str)
def world(request, monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = World(*request.param)
    make = distributed_c10d._new_process_group_helper

    def counted(*arguments, **options):
        world.made[options.get("group_desc")] += 1
        return make(*arguments, **options)

    reset()
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        DistributedManager.initialize(device="cpu")
        monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", counted)
        yield world
    finally:
        reset()
        dist.destroy_process_group()


def tree(world):
    """Return the tree world -> (data, model -> (spatial, channel))."""
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    for name, parent in (("data", "world"), ("model", "world"), ("spatial", "model"), ("channel", "model")):
        config.add_node(ProcessGroupNode(name), parent)
    config.set_leaf_group_sizes(dict(zip(AXES, world.shape, strict=True)))
    return config


def check(group, ranks):
    assert dist.get_process_group_ranks(group) == ranks.tolist()
    assert (dist.get_world_size(group), dist.get_rank(group)) == (len(ranks), ranks.tolist().index(dist.get_rank()))


def test_a_rank_makes_the_groups_of_a_tree_that_it_is_in(world):
    manager = DistributedManager()
    DistributedManager.create_groups_from_config(tree(world))
    assert manager.group_names == ("data", "model", "spatial", "channel")
    for name, ranks in world.expected().items():
        assert manager.group_ranks(name) == tuple(ranks)
        check(manager.group(name), ranks)
    assert set(world.made) == set(manager.group_names)
    assert max(world.made.values()) <= MOST


def test_a_rank_makes_the_groups_of_a_mesh_that_it_is_in(world):
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1, *world.shape[1:]), AXES)
    assert manager.mesh_sizes() == world.shape == tuple(mesh.shape)
    expected = world.expected()
    for name in AXES:
        check(manager.group(name), expected[name])
        assert mesh.get_group(name) is manager.group(name)
        assert manager.mesh(name).mesh.tolist() == expected[name].tolist()
    assert set(world.made) == set(AXES)
    check(manager.get_mesh_group(manager.mesh(("spatial", "channel"))), expected["model"])
    assert sum(world.made.values()) <= MOST * len(expected)


def test_a_rank_makes_the_groups_that_it_asks_for_one_after_the_other(world):
    manager = DistributedManager()
    expected = world.expected()
    orthogonal = DistributedManager.create_group_from_node(ProcessGroupNode("model", len(expected["model"])))
    DistributedManager.create_process_subgroup("channel", world.shape[2], "model")
    DistributedManager.create_orthogonal_process_group("across", "channel")
    for name in ("model", "channel"):
        check(manager.group(name), expected[name])
    check(manager.group("across"), world.ranks[:, :, world.rank % world.shape[2]].ravel())
    assert set(world.made) == {"model", "channel", "across"}
    check(manager.group(orthogonal), expected["data"])
    assert sum(world.made.values()) <= MOST * 4
