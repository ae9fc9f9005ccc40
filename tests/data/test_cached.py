from itertools import chain

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.data import Hdf5Dataset, RankCachedDataset, distributed_loader, rank_cached_loader
from distman.handler import NNHandler
from distman.testing import ranks


class Samples(Dataset):
    """Nested samples of numbers, and a record of which were read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return {"image": np.full((2, 3), index, dtype=np.float32), "label": (index, float(index))}


class Ragged(Samples):
    """The samples behind one index are longer."""

    def __init__(self, length, index):
        super().__init__(length)
        self.index = index

    def __getitem__(self, index):
        return torch.zeros(1 + index // self.index)


class Named(Samples):
    def __getitem__(self, index):
        return index, "name"


@ranks(1, 4)
@pytest.mark.parametrize("length", [1, 3, 11])
def test_each_rank_reads_its_shard_once(rank, world_size, length):
    samples = Samples(length)
    cached = RankCachedDataset(samples)
    assert cached.sizes == [length // world_size + (one < length % world_size) for one in range(world_size)]
    assert len(cached) == cached.sizes[rank]
    assert set(samples.read) == (set(range(sum(cached.sizes[:rank]), sum(cached.sizes[: rank + 1]))) or {0})
    for loader in (rank_cached_loader(cached, batch_size=2), rank_cached_loader(cached, batch_size=2)):
        own = []
        for batch in loader:
            assert batch["image"].shape[1:] == (2, 3)
            assert batch["label"][0].tolist() == batch["label"][1].tolist() == batch["image"][:, 1, 2].tolist()
            own += batch["label"][0][: loader.num_own].tolist()
        assert sorted([*chain(*all_gather_objects(own))]) == list(range(length))
    num_read = len(samples.read)
    assert cached[:]["image"].shape[1:] == (2, 3)
    start = sum(cached.sizes[:rank])
    assert cached[:]["label"][0].tolist() == [int(one["label"][0]) for one in cached]
    assert cached[:]["label"][0].tolist() == list(range(start, start + len(cached)))
    with pytest.raises(IndexError):
        cached[len(cached)]
    assert len(samples.read) == num_read


@ranks(2)
def test_a_batch_may_be_changed(rank):
    cached = RankCachedDataset(TensorDataset(torch.arange(6.0)))
    for loader in (rank_cached_loader(cached, batch_size=2), rank_cached_loader(cached, batch_size=2, evaluation=True)):
        for (values,) in loader:
            values.zero_()
    assert cached[:][0].tolist() == [3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]


@ranks(2)
def test_larger_than_a_chunk():
    values = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    for dataset in (TensorDataset(values), [(value,) for value in values]):
        own = torch.cat([batch for (batch,) in rank_cached_loader(dataset, evaluation=True, batch_size=999)])
        assert torch.equal(torch.cat(all_gather_objects(own)), values)


class Normalized(TensorDataset):
    def __getitem__(self, index):
        return tuple(value - 5 for value in super().__getitem__(index))


class Shifted(Hdf5Dataset):
    """A part of the samples, from the third on."""

    def __len__(self):
        return super().__len__() - 2

    def __getitem__(self, index):
        return super().__getitem__(index + 2)


@ranks(1, 2)
@pytest.mark.parametrize("length", [3, 8])
def test_what_a_subclass_makes_of_its_samples_is_kept(length, rank, tmp_path):
    path = tmp_path / f"{rank}.h5"
    with h5py.File(path, "w") as file:
        file["numbers"] = range(length)
    for dataset in (Normalized(torch.arange(length)), Shifted(path, ["numbers"])):
        own = [int(value) for (batch,) in rank_cached_loader(dataset, evaluation=True) for value in batch]
        assert [*chain(*all_gather_objects(own))] == [int(dataset[index][0]) for index in range(len(dataset))]


@ranks(1)
def test_samples_that_cannot_be_cached():
    with pytest.raises(
        ValueError,
        match="samples must have the same shape and dtype to be cached, got different ones among 1024 to 2047",
    ):
        RankCachedDataset(Ragged(3000, 1500))
    with pytest.raises(
        ValueError,
        match="samples must have the same shape and dtype to be cached, got different ones among 2048 to 2999",
    ):
        RankCachedDataset(Ragged(3000, 2048))
    with pytest.raises(
        ValueError, match="samples must have the same shape and dtype to be cached, got different ones among 0 to 2"
    ):
        RankCachedDataset([0, 0.5, 0.9])
    with pytest.raises(TypeError, match=r"samples must consist of numbers to be cached, got 'name'"):
        RankCachedDataset(Named(2))
    with pytest.raises(ValueError, match="dataset must have at least one sample to be cached, got none"):
        RankCachedDataset(Samples(0))
    with pytest.raises(TypeError, match="device must be left out: the dataset is cached already"):
        rank_cached_loader(RankCachedDataset(Samples(2)), device="cpu")


@ranks(4)
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_shard_is_for_the_group_that_shares_the_dataset(evaluation):
    DistributedManager().initialize_mesh((2, 2), ("data", "model"))
    groups, dataset = ("data", "model", None), TensorDataset(torch.arange(7))
    shards = {group: RankCachedDataset(dataset, group=group) for group in groups}
    for made_for, shard in shards.items():
        for group in groups:
            if group == made_for:
                loader = rank_cached_loader(shard, evaluation=evaluation, batch_size=7, group=group)
                own = [int(value) for (batch,) in loader for value in batch]
                assert sorted(chain(*all_gather_objects(own, group=group))) == list(range(7))
            else:
                with pytest.raises(ValueError, match="group must be the one that shares the shard's dataset, ranks"):
                    rank_cached_loader(shard, evaluation=evaluation, group=group)


@ranks(2)
def test_a_shard_is_divided_no_more(rank):
    samples = TensorDataset(torch.arange(10.0)[:, None])
    shard = RankCachedDataset(samples)
    for call in (distributed_loader, lambda data: distributed_loader(data, evaluation=True), RankCachedDataset):
        with pytest.raises(TypeError, match=r"got a RankCachedDataset, which is a shard\."):
            call(shard)
    predicted = NNHandler(torch.nn.Flatten).predict(shard, batch_size=2)
    assert predicted is None if rank else torch.equal(predicted, torch.arange(10.0)[:, None])
