"""Trees of groups: how they are put together, and how sizes travel from the leaves to the root."""

import re

import numpy as np
import pytest

from distman.errors import UndefinedGroupError
from distman.topology import ProcessGroupConfig, ProcessGroupNode, parse_tree, tree_plan


@pytest.fixture
def nested():
    """The tree world -> (data, model -> (spatial, channel))."""
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    model = ProcessGroupNode("model")
    config.add_node(ProcessGroupNode("data"), "world")
    config.add_node(model, config.root)
    config.add_node(ProcessGroupNode("spatial"), model)
    config.add_node(ProcessGroupNode("channel"), "model")
    return config


def test_a_parent_is_a_name_or_a_node(nested):
    assert [node.name for node in nested.children("world")] == ["data", "model"]
    assert [node.name for node in nested.children("model")] == ["spatial", "channel"]
    assert nested.get_node("world") is nested.root


def test_leaves_are_listed_from_left_to_right(nested):
    assert nested.leaf_groups() == ["data", "spatial", "channel"]
    assert nested.leaves_below("model") == ["spatial", "channel"]
    assert nested.leaves_below("data") == ["data"]
    assert [node.name for node in nested.nodes_below_root()] == ["data", "model", "spatial", "channel"]


def test_leaves_keep_their_place_when_a_child_is_added_late(nested):
    nested.add_node(ProcessGroupNode("inner"), "data")
    assert nested.leaf_groups() == ["inner", "spatial", "channel"]


def test_a_root_alone_is_a_leaf():
    assert ProcessGroupConfig(ProcessGroupNode("world", 4)).leaf_groups() == ["world"]


@pytest.mark.parametrize("name", ["world", "model", "channel"])
def test_a_name_is_used_once(nested, name):
    with pytest.raises(ValueError, match=f"must not be taken in its tree, got '{name}'"):
        nested.add_node(ProcessGroupNode(name), "data")
    assert nested.leaf_groups() == ["data", "spatial", "channel"]


@pytest.mark.parametrize("parent", ["modle", ProcessGroupNode("modle")])
def test_an_unknown_parent_is_an_error_that_suggests_one(nested, parent):
    with pytest.raises(UndefinedGroupError, match=r"'modle' must be a node of the tree.*Did you mean 'model'\?"):
        nested.add_node(ProcessGroupNode("time"), parent)
    with pytest.raises(UndefinedGroupError):
        nested.get_node("time")


@pytest.mark.parametrize("ask", ["get_node", "children", "leaves_below"])
def test_unknown_names_are_errors_that_list_the_known_ones(nested, ask):
    known = "'channel', 'data', 'model', 'spatial', 'world'"
    with pytest.raises(UndefinedGroupError, match=re.escape(f"'xyz' must be a node of the tree, known are {known}.")):
        getattr(nested, ask)("xyz")


def test_sizes_of_leaves_are_multiplied_up_to_the_root(nested):
    nested.set_leaf_group_sizes({"data": 2, "spatial": 3, "channel": 4})
    assert {name: nested.get_node(name).size for name in ("world", "data", "model", "spatial", "channel")} == {
        "world": 24,
        "data": 2,
        "model": 12,
        "spatial": 3,
        "channel": 4,
    }


def test_parents_wait_when_they_are_told_to(nested):
    nested.set_leaf_group_sizes({"data": 2, "spatial": 3, "channel": 4}, update_parent_sizes=False)
    assert (nested.root.size, nested.get_node("model").size) == (None, None)
    assert nested.update_parent_sizes() == 24
    assert (nested.root.size, nested.get_node("model").size) == (24, 12)


def test_sizes_may_come_one_by_one_and_change(nested):
    for name, size in (("data", 2), ("spatial", 3), ("channel", 4)):
        nested.set_leaf_group_sizes({name: size}, update_parent_sizes=False)
    nested.update_parent_sizes()
    nested.set_leaf_group_sizes({"data": 5})
    assert nested.root.size == 60


def test_a_leaf_without_a_size_is_named(nested):
    with pytest.raises(ValueError, match="the size of group 'channel' must be a positive number of ranks, got None"):
        nested.set_leaf_group_sizes({"data": 2, "spatial": 3})


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None])
def test_a_size_is_a_positive_number(nested, size):
    with pytest.raises(
        ValueError, match=f"the size of group 'spatial' must be a positive number of ranks, got {size!r}"
    ):
        nested.set_leaf_group_sizes({"data": 2, "spatial": size, "channel": 4})
    assert nested.get_node("data").size is None


@pytest.mark.parametrize("kind", [np.int64, np.uint8, int])
def test_a_size_may_be_a_number_of_numpy(nested, kind):
    nested.set_leaf_group_sizes({"data": kind(2), "spatial": kind(3), "channel": kind(4)})
    assert (str(nested), nested.root.size) == ("world(data=2, model(spatial=3, channel=4))", 24)
    assert tree_plan(nested, 24) == tree_plan(parse_tree(str(nested)), 24)


def test_only_leaves_are_given_sizes(nested):
    with pytest.raises(ValueError, match="for leaves only, got one for 'model'"):
        nested.set_leaf_group_sizes({"data": 2, "model": 12})
    with pytest.raises(UndefinedGroupError, match=r"Did you mean 'spatial'\?"):
        nested.set_leaf_group_sizes({"data": 2, "spacial": 3})
    assert nested.get_node("data").size is None


def test_a_tree_is_shown_with_the_sizes_of_its_leaves(nested):
    nested.set_leaf_group_sizes({"data": 2, "spatial": 3, "channel": 4})
    assert str(nested) == "world(data=2, model(spatial=3, channel=4))"
