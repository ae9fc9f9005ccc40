import random
from itertools import chain

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from distman.collectives import all_gather_objects
from distman.data import distributed_stream
from distman.data._distributed_stream import _Part, _share
from distman.testing import ranks


@given(
    lengths=st.lists(st.integers(0, 7), max_size=9),
    workers=st.lists(st.integers(1, 3), min_size=1, max_size=5),
)
def test_every_sample_has_one_reader_whatever_the_numbers_of_shards_ranks_and_workers(lengths, workers):
    shards = [_Part(shard) for shard in range(len(lengths))]
    read = [
        (part.shard, sample)
        for rank, num_workers in enumerate(workers)
        for worker in range(num_workers)
        for part in _share(_share(shards, rank, len(workers)), worker, num_workers)
        for sample in range(part.start, lengths[part.shard], part.step)
    ]
    assert sorted(read) == [(shard, sample) for shard, length in enumerate(lengths) for sample in range(length)]


@given(num_shards=st.integers(1, 20), size=st.integers(1, 6))
def test_readers_have_as_many_whole_shards_and_at_most_one_that_is_shared(num_shards, size):
    for index in range(size):
        steps = [part.step for part in _share([_Part(shard) for shard in range(num_shards)], index, size)]
        assert steps.count(1) >= num_shards // size
        assert len(steps) <= num_shards // size + 1


class Lines(IterableDataset):
    """Shards of some lengths, in an order that depends on the epoch; it splits itself by worker, as torch advises."""

    def __init__(self, lengths, *, first=0):
        self.lengths, self.epoch, self.first = lengths, 0, first
        self.num_shards = len(lengths)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        return Lines([self.lengths[index]], first=self.first + sum(self.lengths[:index])).at(self.epoch)

    def at(self, epoch):
        self.epoch = epoch
        return self

    def __iter__(self):
        total = sum(self.lengths)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        worker = get_worker_info()
        own = order if worker is None else order[worker.id :: worker.num_workers]
        return (self.first + index for index in own)


class Positioned(Lines):
    """A stream that can say and restore where it is."""

    def __init__(self, lengths, *, first=0):
        super().__init__(lengths, first=first)
        self.num_read = 0

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        return Positioned([self.lengths[index]], first=self.first + sum(self.lengths[:index])).at(self.epoch)

    def __iter__(self):
        rest = [*super().__iter__()][self.num_read :]
        for sample in rest:
            self.num_read += 1
            yield sample
        self.num_read = 0

    def state_dict(self):
        return {"num_read": self.num_read}

    def load_state_dict(self, state):
        self.num_read = state["num_read"]


class Whole(IterableDataset):
    """The same without shards."""

    def __init__(self, lines):
        self.lines = lines

    def set_epoch(self, epoch):
        self.lines.set_epoch(epoch)

    def __iter__(self):
        return iter(self.lines)


def draw(seed):
    """Return the lengths of some shards, and a batch size."""
    source = random.Random(seed)  # noqa: S311 - no secret
    return [source.randrange(9) for _ in range(source.randrange(1, 7))], source.randrange(1, 5)


@ranks(1, 4)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, on two cores
@pytest.mark.parametrize("seed", range(3))
def test_every_epoch_has_every_sample_once_with_any_number_of_workers(seed, rank):
    lengths, batch_size = draw(seed)
    expected = list(range(sum(lengths)))
    for make in (Lines, Positioned, lambda lengths: Whole(Lines(lengths))):
        orders = []
        num_workers = (seed + rank) % 4 if make is Lines else 0  # another number on each rank
        stream = distributed_stream(make(lengths))
        loader = DataLoader(stream, batch_size=batch_size, num_workers=num_workers, persistent_workers=num_workers == 3)
        for epoch in (0, 1):
            stream.set_epoch(epoch)
            own = [sample for batch in loader for sample in batch.tolist()]
            orders.append(all_gather_objects(own))
            assert sorted(chain(*orders[-1])) == expected
        assert orders[0] != orders[1] or len(expected) < 9


@ranks(1, 2)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_epoch_that_the_program_tells_the_dataset_itself_is_not_undone(num_workers):
    dataset = Lines([30, 40])
    stream = distributed_stream(dataset)
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    orders = []
    for epoch in (0, 1, 2):
        dataset.set_epoch(epoch)
        orders.append([*loader])
        assert dataset.epoch == epoch
    assert orders[0] != orders[1] != orders[2] != orders[0]
    stream.set_epoch(0)
    assert [*loader] == orders[0]


@ranks(1, 3)
@pytest.mark.parametrize("seed", range(6))
def test_a_position_is_restored_without_reading_again(seed):
    lengths, _ = draw(seed)
    stream = distributed_stream(Positioned(lengths))
    samples, states = [], [stream.state_dict()]
    for sample in stream:
        samples.append(sample)
        states.append(stream.state_dict())
    for position, state in enumerate([*states, stream.state_dict()]):
        resumed = distributed_stream(Positioned(lengths))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [*resumed] == samples[position:]
        assert [*resumed] == samples


def test_what_is_no_stream_is_refused():
    for wrong in (DataLoader([1]), iter([1]), TensorDataset(torch.ones(1)), 3):
        with pytest.raises(TypeError, match=f"dataset must be an IterableDataset.*, got a {type(wrong).__name__}"):
            distributed_stream(wrong)


class Uncounted:
    def shard(self):
        return []

    def __iter__(self):
        return iter([])


def test_shards_have_to_be_counted():
    with pytest.raises(TypeError, match=r"must have num_shards if it has shard\(\), got Uncounted"):
        distributed_stream(Uncounted())


@ranks(2)
def test_a_stream_without_samples_ends_at_once():
    assert [*distributed_stream(Lines([]))] == []
    assert [*distributed_stream([])] == []
