"""Partitions, against arrays that list every rank."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distman.topology import GridPartition, ListedPartition, split_sizes

HUGE = 2**60  # a world of this size can be asked for one block, never be listed


@st.composite
def grids(draw):
    grid = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    along = draw(st.sets(st.integers(0, len(grid) - 1)))
    return grid, along


def listed(grid, along):
    """Return the blocks as the rows of an array, ordered by their first ranks."""
    across = [axis for axis in range(len(grid)) if axis not in along]
    size = math.prod(grid[axis] for axis in along)
    return np.arange(math.prod(grid)).reshape(grid).transpose([*across, *sorted(along)]).reshape(-1, size)


def as_tuples(rows):
    return sorted(tuple(map(int, row)) for row in rows)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_parts_are_balanced_with_the_larger_ones_first(length, parts):
    sizes = split_sizes(length, parts)
    assert (sum(sizes), len(sizes)) == (length, parts)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes == [len(part) for part in np.array_split(np.arange(length), parts)]


@pytest.mark.parametrize(("length", "parts"), [(3, 0), (3, -1), (-1, 2)])
def test_there_is_no_split_into_no_parts_nor_of_less_than_nothing(length, parts):
    with pytest.raises(ValueError, match=f"got length {length} and parts {parts}"):
        split_sizes(length, parts)


@given(grids())
def test_a_grid_has_the_blocks_of_an_array(drawn):
    partition, rows = GridPartition.of(*drawn), listed(*drawn)
    assert list(partition.blocks()) == as_tuples(rows)
    assert partition.num_blocks == len(rows)
    assert partition.world_size == rows.size
    for block in as_tuples(rows):
        assert [partition.block_of(rank) for rank in block] == [block] * len(block)


@given(grids())
def test_orthogonal_blocks_hold_the_ith_ranks_of_all_blocks(drawn):
    partition = GridPartition.of(*drawn)
    crossed = partition.orthogonal()
    assert list(crossed.blocks()) == as_tuples(listed(*drawn).T)
    assert crossed.orthogonal() == partition


@given(grids(), st.data())
def test_splitting_cuts_every_block_into_consecutive_pieces(drawn, data):
    rows = listed(*drawn)
    size = data.draw(st.sampled_from([size for size in range(1, rows.shape[1] + 1) if rows.shape[1] % size == 0]))
    pieces = as_tuples(rows.reshape(-1, size))
    assert list(GridPartition.of(*drawn).split(size).blocks()) == pieces
    assert list(ListedPartition(tuple(as_tuples(rows))).split(size).blocks()) == pieces


@given(grids(), grids())
def test_equal_partitions_are_equal_objects_and_others_are_not(one, other):
    first, second = GridPartition.of(*one), GridPartition.of(*other)
    are_equal = as_tuples(listed(*one)) == as_tuples(listed(*other))
    assert (first == second) is are_equal
    assert (first.key == second.key) is are_equal


def test_all_ways_to_write_a_grid_of_twelve_ranks_agree_with_its_blocks():
    shapes = [shape for length in (1, 2, 3, 4) for shape in itertools.product((1, 2, 3, 4, 6, 12), repeat=length)]
    by_blocks = {}
    for shape in shapes:
        if math.prod(shape) == 12:
            for chosen in itertools.product((False, True), repeat=len(shape)):
                along = {axis for axis, is_along in enumerate(chosen) if is_along}
                blocks = tuple(as_tuples(listed(shape, along)))
                by_blocks.setdefault(blocks, set()).add(GridPartition.of(shape, along))
    partitions = [partition for spellings in by_blocks.values() for partition in spellings]
    assert len(partitions) == len(by_blocks)
    assert len({partition.key for partition in partitions}) == len(by_blocks)


def test_axes_of_length_one_vanish_and_neighbours_merge():
    sixes = GridPartition((2, 6), (False, True))
    assert GridPartition.of([2, 1, 3, 2], [2, 3]) == GridPartition.of([2, 6], [1]) == sixes
    assert GridPartition.whole(6) == GridPartition.of([1, 3, 2], [0, 1, 2])
    assert GridPartition.whole(12).split(6) == sixes


def test_a_world_of_one_rank_is_one_block():
    for partition in (GridPartition.whole(1), GridPartition.of([1, 1], []), GridPartition.whole(1).split(1)):
        assert list(partition.blocks()) == [(0,)]
        assert (partition.num_blocks, partition.world_size, partition.block_of(0)) == (1, 1, (0,))
        assert partition.orthogonal() == partition


@pytest.mark.parametrize("size", [0, -2, 4, 12])
@pytest.mark.parametrize("partition", [GridPartition.of([2, 6], [1]), ListedPartition(((0, 1, 2), (3, 4, 5)))])
def test_a_size_that_does_not_divide_is_an_error(partition, size):
    block_size = partition.world_size // 2
    with pytest.raises(ValueError, match=f"divisor of the parent group's size {block_size}, got {size}"):
        partition.split(size)


def test_pieces_that_are_no_grid_are_listed():
    blocks_of_two_runs = GridPartition.of([2, 2, 3], [0, 2])
    pieces = blocks_of_two_runs.split(2)
    assert list(pieces.blocks()) == [(0, 1), (2, 6), (3, 4), (5, 9), (7, 8), (10, 11)]
    assert list(pieces.split(1).blocks()) == [(rank,) for rank in range(12)]


def test_a_listed_partition_may_be_uneven():
    partition = ListedPartition(((4, 3), (5, 0, 1), (2,)))
    assert list(partition.blocks()) == [(0, 1, 5), (2,), (3, 4)]
    assert (partition.num_blocks, partition.world_size) == (3, 6)
    assert [partition.block_of(rank) for rank in (0, 2, 4, 5)] == [(0, 1, 5), (2,), (3, 4), (0, 1, 5)]
    assert list(partition.split(1).blocks()) == [(rank,) for rank in range(6)]
    with pytest.raises(ValueError, match=r"equal in size to have orthogonal groups, got sizes \[1, 2, 3\]"):
        partition.orthogonal()
    with pytest.raises(ValueError, match="divisor of the parent group's size 3, got 2"):
        partition.split(2)


def test_the_order_of_listing_does_not_matter():
    partition = ListedPartition(((3, 1), (0, 2)))
    same = ListedPartition(((2, 0), (1, 3)))
    other = ListedPartition(((0, 1), (2, 3)))
    assert (partition, partition.key) == (same, same.key)
    assert (partition == other, partition.key == other.key) == (False, False)
    assert list(partition.orthogonal().blocks()) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("blocks", [((0, 1), (1, 2)), ((0,), (2,)), ((1, 2),), ((-1, 0),)])
def test_every_rank_is_listed_once(blocks):
    with pytest.raises(ValueError, match=r"blocks must hold every rank from 0 to \d once"):
        ListedPartition(blocks)


def test_large_partitions_are_shown_in_short():
    assert str(GridPartition.of([2, 3], [1])) == "[0, 1, 2] [3, 4, 5]"
    assert str(GridPartition.whole(16)) == "[0, 1, ..., 15; 16 ranks]"
    assert str(GridPartition.of([6, 2], [1])) == "[0, 1] [2, 3] [4, 5] [6, 7] ... (6 groups)"


def test_one_block_costs_itself_and_not_the_world():
    """With work or memory in proportion to a world of 2**60 ranks, none of these lines would end."""
    pairs = GridPartition.whole(HUGE).split(2)
    assert pairs.block_of(HUGE - 1) == (HUGE - 2, HUGE - 1)
    assert (pairs.num_blocks, pairs.world_size) == (HUGE // 2, HUGE)
    crossed = GridPartition.whole(HUGE).split(HUGE // 4).orthogonal()
    assert crossed.block_of(5) == tuple(5 + HUGE // 4 * index for index in range(4))
    assert crossed.split(2).block_of(5) == (5, 5 + HUGE // 4)


def test_a_world_of_many_hosts_is_listed_in_no_time():
    """With work for each pair of blocks, this would take minutes."""
    hosts = ListedPartition(tuple(tuple(range(first, first + 8)) for first in range(0, 2**17, 8)))
    crossed = hosts.split(4).orthogonal(within=hosts)
    assert crossed.num_blocks == 2**16
    assert crossed.block_of(9) == (9, 13)


def test_showing_a_partition_costs_what_is_shown_and_not_the_world():
    pairs = GridPartition.whole(2**16).split(2)
    tracemalloc.start()
    try:
        assert str(pairs) == "[0, 1] [2, 3] [4, 5] [6, 7] ... (32768 groups)"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**16  # bytes: two for each group


def test_orthogonal_inside_a_coarser_partition():
    outer = GridPartition.of([2, 2, 3], [0, 2])
    inner = outer.split(3)
    expected = [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]
    assert list(inner.orthogonal(outer).blocks()) == expected
    assert isinstance(inner.orthogonal(outer), GridPartition)
    assert list(ListedPartition(tuple(inner.blocks())).orthogonal(outer).blocks()) == expected
    uneven = ListedPartition(((0, 1, 2, 3), (4, 5)))
    assert list(uneven.split(2).orthogonal(uneven).blocks()) == [(0, 2), (1, 3), (4,), (5,)]
    assert inner.orthogonal(GridPartition.whole(12)) == inner.orthogonal()
