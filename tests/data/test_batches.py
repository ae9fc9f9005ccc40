import itertools
import random
from collections import Counter

import pytest
import torch

from distman import DistributedManager
from distman._base.seeds import seed_of
from distman.collectives import all_gather_objects
from distman.data._batches import EvaluationBatches, ShardBatches, TrainingBatches
from distman.testing import ranks

SIZES = [(1, 1), (3, 1), (7, 3), (8, 2), (65, 16), (65, 4)]


def epochs(batches, number):
    return [list(batches) for _ in range(number)]


def shares(batches):
    """Return how many samples are each rank's own at each step, as all ranks see them."""
    counts = list(batches.counts(epoch=0))
    own = all_gather_objects([num_own for num_own, _ in counts])
    totals = [num_total for _, num_total in counts]
    assert [sum(step) for step in zip(*own, strict=True)] == totals
    return own


def joined(parts, own):
    """Return the ranks' own samples step by step."""
    return [
        [sample for part, num in zip(step, nums, strict=True) for sample in part[:num]]
        for step, nums in zip(zip(*parts, strict=True), zip(*own, strict=True), strict=True)
    ]


@ranks(1, 4)
@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_every_sample_is_drawn_once_and_all_ranks_make_equal_steps(num_samples, batch_size, world_size):
    batches = TrainingBatches(num_samples, batch_size)
    own = shares(batches)
    for parts in zip(*all_gather_objects(epochs(batches, 2)), strict=True):
        steps = joined(parts, own)
        assert len(steps) == len(batches) == -(-num_samples // (batch_size * world_size))
        assert sorted(itertools.chain(*steps)) == list(range(num_samples))
        assert all(0 < len(part) <= batch_size for rank_parts in parts for part in rank_parts)


@ranks(1, 4)
def test_the_batches_of_the_job_are_the_same_on_any_number_of_ranks(world_size):
    batches = TrainingBatches(65, 16 // world_size, seed=3)
    own = shares(batches)
    found = [joined(parts, own) for parts in zip(*all_gather_objects(epochs(batches, 2)), strict=True)]
    orders = [torch.randperm(65, generator=torch.Generator().manual_seed(seed_of(3, epoch))) for epoch in range(2)]
    assert found == [[batch.tolist() for batch in order.split(16)] for order in orders]


@ranks(2)
def test_epochs_differ_by_themselves_and_seeds_share_none():
    first, second = epochs(TrainingBatches(64, 4), 2)
    assert sorted(itertools.chain(*first)) != list(itertools.chain(*first))
    assert first != second
    others = epochs(TrainingBatches(64, 4, seed=1), 2)
    assert not any(one == other for one in (first, second) for other in others)
    batches = TrainingBatches(64, 4)
    batches.start_at(1)
    assert list(batches) == second


@ranks(1, 3)
def test_in_order_and_without_the_last_batch(rank, world_size):
    batches = TrainingBatches(10, 2, shuffle=False, drop_last=True)
    expected = torch.arange(10).split(2 * world_size)[: 10 // (2 * world_size)]
    assert list(batches) == [batch.split(2)[rank].tolist() for batch in expected]
    assert len(batches) == len(expected)
    assert len(TrainingBatches(3, 4, drop_last=True)) == 0


@ranks(1, 4)
def test_an_epoch_goes_on_from_any_step():
    batches = TrainingBatches(23, 2, seed=5)
    (whole,) = epochs(batches, 1)
    for step in range(len(batches)):
        batches.start_at(0, step * batches.stride)
        assert list(batches) == whole[step:]
    batches.start_at(0, batches.end)
    assert list(batches) == []


@ranks(1, 2)
def test_a_position_fits_another_batch_size_and_loses_no_sample():
    first = TrainingBatches(23, 2, shuffle=False)
    before = list(first)[:2]
    second = TrainingBatches(23, 5, shuffle=False)
    second.start_at(0, 2 * first.stride)
    mine = Counter(itertools.chain(*before, *second))
    everyone = sum(all_gather_objects(mine), Counter())
    assert sorted(everyone) == list(range(23))


@ranks(1, 3)
@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_dropped_that_is_full_and_none_is_drawn_that_is_not(seed, world_size):
    source = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(20):
        length, batch_size = source.randrange(1, 40), source.randrange(1, 9)
        sizes = [source.randrange(1, 40) for _ in range(world_size)]
        whole = TrainingBatches(length, batch_size, drop_last=True)
        shards = ShardBatches(sizes, batch_size, drop_last=True)
        for batches, total in ((whole, length), (shards, min(sizes))):
            for position in (0, source.randrange(total)):
                full = (total - position) // batches.stride
                assert [*batches.counts(0, position)] == [(batch_size, batch_size * world_size)] * full
                assert [len(part) for part in batches.parts(0, position)] == [batch_size] * full
                assert position + full * batches.stride >= batches.end
            assert len(batches) == total // batches.stride


@ranks(1)
def test_numbers_that_do_not_fit():
    with pytest.raises(ValueError, match="the length of the dataset must be at least 1, got 0"):
        TrainingBatches(0, 1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        EvaluationBatches(3, 0)
    with pytest.raises(ValueError, match=r"sizes must have one number for each of 1 ranks, got \[1, 2\]"):
        ShardBatches([1, 2], 1)
    with pytest.raises(ValueError, match="the length of the dataset must be at least 1, got 0"):
        ShardBatches([0], 1)


@ranks(1, 4)
@pytest.mark.parametrize("num_samples", [0, 1, 3, 10, 11])
def test_evaluation_reads_each_sample_once_in_rank_order(num_samples):
    parts = all_gather_objects(list(EvaluationBatches(num_samples, 3)))
    assert list(itertools.chain(*itertools.chain(*parts))) == list(range(num_samples))
    assert all(0 < len(batch) <= 3 for part in parts for batch in part)


@ranks(3)
@pytest.mark.parametrize("sizes", [[4, 4, 3], [5, 0, 1], [1, 1, 1]])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_shards_are_drawn_once_in_equal_steps(rank, sizes, batch_size):
    batches = ShardBatches(sizes, batch_size)
    own = shares(batches)[rank]
    first, second = epochs(batches, 2)
    for epoch in (first, second):
        assert len(epoch) == len(batches) == -(-max(sizes) // batch_size)
        assert sorted(itertools.chain(*(part[:num] for part, num in zip(epoch, own, strict=True)))) == list(
            range(sizes[rank])
        )
        assert all(epoch)
    batches.start_at(0, batch_size)
    assert list(batches) == first[1:]
    assert len(list(ShardBatches(sizes, batch_size, drop_last=True))) == min(sizes) // batch_size


@ranks(2)
def test_shards_of_equal_length_are_drawn_differently():
    one, other = all_gather_objects(list(ShardBatches([50, 50], 5)))
    assert one != other


@ranks(4)
def test_groups_share_the_samples_among_themselves():
    DistributedManager.create_process_subgroup("pairs", 2)
    parts = all_gather_objects(list(EvaluationBatches(5, 2, group="pairs")))
    assert parts[:2] == parts[2:] == [[[0, 1], [2]], [[3, 4]]]
    assert len(TrainingBatches(5, 1, group="pairs")) == 3
