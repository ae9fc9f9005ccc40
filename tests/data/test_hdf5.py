from itertools import chain

import h5py
import numpy as np
import pytest

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.data import Hdf5Dataset, distributed_loader, rank_cached_loader
from distman.testing import ranks


@ranks(1, 3)
def test_hdf5(rank, tmp_path):
    path = tmp_path / "data.h5"
    if rank == 0:
        with h5py.File(path, "w") as file:
            file["fields"] = np.arange(20.0).reshape(10, 2)
            file["grid/labels"] = np.arange(10)
    DistributedManager().barrier()
    dataset = Hdf5Dataset(path, ["fields", "grid/labels"])
    cached = rank_cached_loader(dataset, evaluation=True, batch_size=2)
    streamed = distributed_loader(dataset, evaluation=True, batch_size=2, num_workers=1)
    for loader in (cached, streamed):
        own = [(fields.tolist(), labels.tolist()) for fields, labels in loader]
        fields = [*chain(*(one for part in all_gather_objects(own) for one, _ in part))]
        labels = [*chain(*(one for part in all_gather_objects(own) for _, one in part))]
        assert fields == np.arange(20.0).reshape(10, 2).tolist()
        assert labels == list(range(10))
    with pytest.raises(
        ValueError, match=r"names must be datasets in .*, got \['grid', 'no'\]. The file has \['fields', "
    ):
        Hdf5Dataset(path, ["fields", "grid", "no"])
    with pytest.raises(FileNotFoundError):
        Hdf5Dataset(tmp_path / "no.h5", ["fields"])


def test_hdf5_of_unequal_length(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["a"], file["b"] = np.zeros(3), np.zeros(4)
    with pytest.raises(ValueError, match=r"datasets must be equally long, got \{'a': 3, 'b': 4\}"):
        Hdf5Dataset(tmp_path / "data.h5", ["a", "b"])


def test_no_name_is_looked_up_for_a_row(monkeypatch, tmp_path):
    """It takes several times as long as reading the row."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["a"], file["b"] = np.arange(5), np.arange(5)
    dataset = Hdf5Dataset(tmp_path / "data.h5", ["a", "b"])
    for method in ("__getitem__", "get"):
        monkeypatch.delattr(h5py.Group, method)
    assert [a.item() for a, _ in (dataset[i] for i in range(5))] == list(range(5))
