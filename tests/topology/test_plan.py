"""Plans of trees and meshes, against arrays that list every rank."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distman.topology import GridPartition, Plan, ProcessGroupConfig, ProcessGroupNode, mesh_plan, tree_plan
from distman.topology._partition import resolve_mesh_shape

LARGE_WORLDS = [(16, 8, 8), (256, 8, 8), (1024, 8, 8)]


def tree(sizes, below):
    """Return the tree of these leaf sizes, with the names of children by parent; the first parent is the root."""
    config = ProcessGroupConfig(ProcessGroupNode(next(iter(below))))
    for parent, children in below.items():
        for child in children:
            config.add_node(ProcessGroupNode(child), parent)
    config.set_leaf_group_sizes(sizes)
    return config


def nested(data, spatial, channel):
    sizes = {"data": data, "spatial": spatial, "channel": channel}
    return tree(sizes, {"world": ["data", "model"], "model": ["spatial", "channel"]})


def rows(array, *axes):
    """Return the blocks of an array of ranks along some of its axes, ordered by their first ranks."""
    last = range(-len(axes), 0)
    return sorted(
        map(tuple, np.moveaxis(array, axes, last).reshape(-1, math.prod(array.shape[a] for a in axes)).tolist())
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_mesh_has_one_group_per_axis_and_so_has_a_tree_of_leaves(shape):
    names = [f"axis {axis}" for axis in range(len(shape))]
    world_size = math.prod(shape)
    plan = mesh_plan(shape, names, world_size)
    ranks = np.arange(world_size).reshape(shape)
    assert list(plan.partitions) == names
    for axis, partition in enumerate(plan.partitions.values()):
        assert list(partition.blocks()) == rows(ranks, axis)
    same = tree_plan(tree(dict(zip(names, shape, strict=True)), {"world": names}), world_size)
    assert (plan, plan.digest) == (same, same.digest)


@given(st.tuples(*[st.integers(1, 4)] * 3))
def test_a_nested_tree_has_a_group_per_node(shape):
    plan = tree_plan(nested(*shape), math.prod(shape))
    ranks = np.arange(math.prod(shape)).reshape(shape)
    expected = {"data": (0,), "model": (1, 2), "spatial": (1,), "channel": (2,)}
    assert list(plan.partitions) == list(expected)
    for name, axes in expected.items():
        assert list(plan.partitions[name].blocks()) == rows(ranks, *axes)


def test_siblings_are_orthogonal_inside_their_parent():
    plan = tree_plan(nested(2, 3, 4), 24)
    assert plan.partitions["data"] == plan.partitions["model"].orthogonal()
    for rank in range(24):
        spatial, channel = (set(plan.partitions[name].block_of(rank)) for name in ("spatial", "channel"))
        assert spatial & channel == {rank}
        assert spatial | channel <= set(plan.partitions["model"].block_of(rank))


def test_a_tree_of_three_levels_keeps_the_last_leaf_on_neighbours():
    below = {"world": ["a", "b"], "a": ["c", "d"], "b": ["e"], "d": ["f", "g"]}
    plan = tree_plan(tree({"c": 2, "f": 2, "g": 3, "e": 2}, below), 24)
    ranks = np.arange(24).reshape(2, 2, 3, 2)
    expected = {"a": (0, 1, 2), "b": (3,), "c": (0,), "d": (1, 2), "e": (3,), "f": (1,), "g": (2,)}
    assert list(plan.partitions) == list(expected)
    assert {name: list(partition.blocks()) for name, partition in plan.partitions.items()} == {
        name: rows(ranks, *axes) for name, axes in expected.items()
    }


def test_a_root_alone_plans_nothing():
    assert tree_plan(ProcessGroupConfig(ProcessGroupNode("world", 4)), 4) == Plan({})
    assert tree_plan(ProcessGroupConfig(ProcessGroupNode("world")), 4) == Plan({})


def test_a_root_alone_must_fit_the_world():
    with pytest.raises(ValueError, match="world size 4"):
        tree_plan(ProcessGroupConfig(ProcessGroupNode("world", 3)), 4)


def test_a_tree_that_does_not_fit_the_world_is_an_error():
    with pytest.raises(ValueError, match=r"world size 16, got world\(data=2, model\(spatial=3, channel=2\)\)"):
        tree_plan(nested(2, 3, 2), 16)


def test_a_leaf_without_a_size_is_named():
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    for node in (ProcessGroupNode("data", 2), ProcessGroupNode("model"), ProcessGroupNode("time")):
        config.add_node(node, "world")
    with pytest.raises(ValueError, match=r"every leaf of the tree must have a size, got none for \['model', 'time'\]"):
        tree_plan(config, 2)


@pytest.mark.parametrize("name", ["world", "model"])
def test_a_parent_of_another_size_than_its_leaves_is_named(name):
    config = nested(2, 3, 4)
    config.get_node(name).size = 7
    with pytest.raises(ValueError, match=rf"size of group '{name}' must be the product \d+ of its leaves, got 7"):
        tree_plan(config, 24)


def test_parents_need_no_size_of_their_own():
    config = nested(2, 3, 4)
    config.root.size = config.get_node("model").size = None
    assert tree_plan(config, 24) == tree_plan(nested(2, 3, 4), 24)


@pytest.mark.parametrize("size", [0, -2])
def test_a_leaf_of_no_ranks_is_an_error(size):
    config = nested(2, 3, 4)
    config.get_node("channel").size = size
    config.root.size = config.get_node("model").size = None
    with pytest.raises(ValueError, match="must multiply to the world size 24"):
        tree_plan(config, 24)


@pytest.mark.parametrize("size", ["4", 4.0, 1.5])
def test_a_leaf_whose_size_is_no_whole_number_is_an_error(size):
    config = nested(2, 3, 4)
    config.get_node("channel").size = size
    with pytest.raises(
        ValueError, match=rf"must have whole numbers of ranks, got .*'channel': {size!r}.* Set integers"
    ):
        tree_plan(config, 24)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        (24, ("x",), "mesh_shape must be a sequence of lengths, got 24"),
        (None, ("x",), "mesh_shape must be a sequence of lengths, got None"),
        ("24", ("x",), "mesh_shape must be a sequence of lengths, got '24'"),
        ((24,), "x", "mesh_dim_names must be a sequence of names, got 'x'"),
        ((24,), None, "mesh_dim_names must be a sequence of names, got None"),
    ],
)
def test_what_is_no_sequence_is_no_mesh(shape, names, message):
    with pytest.raises(TypeError, match=message):
        mesh_plan(shape, names, 24)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((-1,), (24,)), ((-1, 4), (6, 4)), ((2, -1, 3), (2, 4, 3)), ((24, -1), (24, 1)), ((4, 6), (4, 6))],
)
def test_one_axis_takes_what_the_others_leave(shape, expected):
    names = ["x", "y", "z"][: len(shape)]
    assert resolve_mesh_shape(shape, names, 24) == expected
    assert mesh_plan(shape, names, 24) == mesh_plan(expected, names, 24)


@pytest.mark.parametrize("shape", [(-1, -1), (5, -1), (4, 4), (0, -1), (-2, -12), (-1, 48), (24, 0)])
def test_a_mesh_that_does_not_fit_the_world_is_an_error(shape):
    with pytest.raises(ValueError, match=r"mesh_shape must multiply to the world size 24, got \("):
        mesh_plan(shape, ["x", "y"], 24)


@pytest.mark.parametrize(
    ("shape", "names"), [((), ()), ((2, 2), ("x",)), ((4,), ("x", "y")), ((2, 2), ("x", "x")), ((4,), ())]
)
def test_every_axis_has_one_name(shape, names):
    with pytest.raises(ValueError, match="mesh_dim_names must name each of the"):
        mesh_plan(shape, names, 4)


def test_a_digest_does_not_depend_on_the_order_of_names():
    parts = {"model": GridPartition.of([2, 4], [1]), "data": GridPartition.of([2, 4], [0])}
    assert Plan(parts).digest == Plan(dict(reversed(parts.items()))).digest


@pytest.mark.parametrize(
    "other",
    [
        {"data": GridPartition.of([2, 4], [1])},
        {"data": GridPartition.of([4, 2], [0])},
        {"Data": GridPartition.of([2, 4], [0])},
        {"data": GridPartition.of([2, 4], [0]), "model": GridPartition.of([2, 4], [1])},
        {},
    ],
)
def test_other_plans_have_other_digests(other):
    assert Plan({"data": GridPartition.of([2, 4], [0])}).digest != Plan(other).digest


def test_a_name_cannot_pass_for_two():
    one = Plan({"a": GridPartition.whole(2), "b": GridPartition.whole(2)})
    other = Plan({f"a' {GridPartition.whole(2).key}\n'b": GridPartition.whole(2)})
    assert one.digest != other.digest


def test_a_plan_is_shown_with_the_ranks_of_its_groups():
    assert str(mesh_plan((2, 3), ("data", "model"), 6)) == "data: [0, 3] [1, 4] [2, 5]\nmodel: [0, 1, 2] [3, 4, 5]"


@pytest.mark.parametrize("shape", LARGE_WORLDS)
def test_large_worlds_are_arithmetic(shape):
    world_size = math.prod(shape)
    assert world_size in (1024, 16_384, 65_536)
    ranks = np.arange(world_size).reshape(shape)
    plan = tree_plan(nested(*shape), world_size)
    for rank in (0, 777, world_size - 1):
        data, spatial, channel = np.unravel_index(rank, shape)
        assert plan.partitions["data"].block_of(rank) == tuple(ranks[:, spatial, channel])
        assert plan.partitions["model"].block_of(rank) == tuple(ranks[data].ravel())
        assert plan.partitions["spatial"].block_of(rank) == tuple(ranks[data, :, channel])
        assert plan.partitions["channel"].block_of(rank) == tuple(ranks[data, spatial])
    num_groups = {name: partition.num_blocks for name, partition in plan.partitions.items()}
    assert num_groups == {"data": 64, "model": shape[0], "spatial": 8 * shape[0], "channel": 8 * shape[0]}


@pytest.mark.parametrize("shape", LARGE_WORLDS)
def test_the_partitions_of_large_worlds_list_no_ranks(shape):
    """Their text has a few characters per axis, and so has what is hashed."""
    plan = tree_plan(nested(*shape), math.prod(shape))
    keys = {name: partition.key for name, partition in plan.partitions.items()}
    assert keys == {
        "data": f"{shape[0]}*x64",
        "model": f"{shape[0]}x64*",
        "spatial": f"{shape[0]}x8*x8",
        "channel": f"{shape[0] * 8}x8*",
    }
    mesh = mesh_plan((-1, 8, 8), ("data", "spatial", "channel"), math.prod(shape))
    assert mesh.partitions == {name: plan.partitions[name] for name in ("data", "spatial", "channel")}


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((8, 8, 8), "Set x=16 or y=16 or z=16, or start 512 ranks; one axis may be -1."),
        ((3, 16, 64), "Set x=1, or start 3072 ranks; one axis may be -1."),
        ((3, 5, 7), "Start 105 ranks, or correct it; one axis may be -1."),
        ((-1, 3, 1), "Start a multiple of 3 ranks, or correct the lengths; one axis may be -1."),
        ((-1, -1, 1), "Correct it; one axis may be -1."),
        ((0, 2, 2), "Correct it; one axis may be -1."),
    ],
)
def test_what_does_not_fit_says_what_would(shape, remedy):
    with pytest.raises(ValueError) as caught:
        mesh_plan(shape, ["x", "y", "z"], 1024)
    assert str(caught.value).endswith(remedy)


LEAVES = {"world": ["data", "model"]}


def test_what_is_proposed_fits():
    with pytest.raises(ValueError, match=r"Set data=8 or model=6, or start 12 ranks\.$"):
        tree_plan(tree({"data": 4, "model": 3}, LEAVES), 24)
    assert tree_plan(tree({"data": 8, "model": 3}, LEAVES), 24).partitions
    assert tree_plan(tree({"data": 4, "model": 6}, LEAVES), 24).partitions
