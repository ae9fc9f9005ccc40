"""Over how many nodes groups extend, against lists of nodes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distman.topology import GridPartition, ListedPartition, Spread, spread_over_nodes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data(), st.integers(1, 9))
def test_nodes_are_those_of_an_array(shape, data, ranks_per_node):
    axis = data.draw(st.integers(0, len(shape) - 1))
    nodes = np.moveaxis(np.arange(math.prod(shape)).reshape(shape) // ranks_per_node, axis, -1).reshape(-1, shape[axis])
    counts = [len(np.unique(group)) for group in nodes]
    assert spread_over_nodes(GridPartition.of(shape, [axis]), ranks_per_node) == Spread(
        len(counts), counts.count(1), min(counts), max(counts)
    )


def test_groups_may_differ():
    spread = spread_over_nodes(ListedPartition(((0, 1), (2, 5), (3, 4))), 2)
    assert (spread, spread.is_on_one_node) == (Spread(3, 1, 1, 2), False)
    assert spread_over_nodes(GridPartition.of([2, 2], [1]), 2).is_on_one_node


def test_a_node_has_ranks():
    with pytest.raises(ValueError, match="ranks_per_node must be at least 1, got 0"):
        spread_over_nodes(GridPartition.whole(4), 0)
