"""What a rank reads of arrays: its block and halo, and nothing else."""

import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.data import Hdf5Dataset, distributed_loader, rank_cached_loader
from distman.domain import DomainDataset, halo_exchange, weighted_sizes
from distman.testing import ranks
from distman.topology import split_sizes
from tests.domain.reference import BOUNDARIES, drawer, with_halo

DIMS = {-2: "rows", -1: "columns"}


class Counting:
    """An array that has no more than shape, dtype and slices, such as zarr's, and counts what is read of it."""

    def __init__(self, array):
        self._array, self.shape, self.dtype, self.num_read, self.num_reads = array, array.shape, array.dtype, 0, 0

    def __getitem__(self, index):
        part = self._array[index]
        self.num_read += part.size
        self.num_reads += 1
        return part


def shape_mesh(world_size):
    rows = 2 if world_size == 4 else 1
    manager = DistributedManager()
    manager.initialize_mesh((rows, world_size // rows), ("rows", "columns"))
    return {dim: (manager.group_rank(name), manager.group_size(name)) for dim, name in DIMS.items()}


@ranks(1, 2, 3, 4)
def test_block_and_halo_are_those_of_the_full_field(world_size):
    places = shape_mesh(world_size)
    for seed in range(12):
        check_drawn_blocks(world_size, seed, places)


def check_drawn_blocks(world_size, seed, places):
    draw = drawer(seed, world_size)
    lengths = [draw.randint(4, 9), draw.randint(4, 9)]
    fields = np.random.default_rng(seed).normal(size=(3, 2, *lengths))
    times = np.arange(6.0).reshape(3, 2)
    halo = {dim: (draw.randint(0, 3), draw.randint(0, 3)) for dim in DIMS}
    boundary = {dim: draw.choice(BOUNDARIES) for dim in DIMS}
    weights = draw.choice([None, {-1: [draw.randint(0, 2) for _ in range(places[-1][1] - 1)] + [1]}])
    counting = Counting(fields.astype(draw.choice([">f8", "<f8"])))  # files may come from other machines
    dataset = DomainDataset([counting, times], DIMS, halo=halo, boundary=boundary, weights=weights)
    block, time = dataset[1]
    expected = torch.from_numpy(fields[1])
    for dim, (rank, size) in places.items():
        length = expected.shape[dim]
        sizes = weighted_sizes(length, weights[dim]) if dim in (weights or {}) else split_sizes(length, size)
        expected = with_halo(expected, dim, sizes, rank, halo[dim], boundary[dim])
    assert torch.equal(block, expected)
    assert torch.equal(time, torch.tensor([2.0, 3.0]))
    assert counting.num_read <= block.numel()
    assert counting.num_reads <= 9, "at most three stretches along each dim: what is compressed is unpacked for each"
    assert len(dataset) == 3


@pytest.mark.parametrize("kind", ["hdf5", "numpy"])
@ranks(4)
def test_bytes_that_are_read(rank, kind, tmp_path):
    shape_mesh(4)
    shape = (2, 512, 512)
    path = tmp_path / "field"
    if rank == 0 and kind == "hdf5":
        with h5py.File(path, "w") as file:
            file["fields"] = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    elif rank == 0:
        np.save(path.with_suffix(".npy"), np.arange(math.prod(shape), dtype=np.float32).reshape(shape))
    DistributedManager().barrier()
    arrays = Hdf5Dataset(path, ["fields"]) if kind == "hdf5" else [np.load(path.with_suffix(".npy"), mmap_mode="r")]
    dataset = DomainDataset(arrays, DIMS, halo=2, boundary="circular")
    dataset[0]
    before = bytes_read()
    (block,) = dataset[1]
    assert bytes_read() - before <= 1.05 * block.numel() * block.element_size()
    row, column = divmod(rank, 2)
    expected = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)[1]
    for dim, place in ((-2, row), (-1, column)):
        expected = with_halo(expected, dim, [256, 256], place, (2, 2), "circular")
    assert torch.equal(block, expected)


def bytes_read():
    """Bytes that this process has asked the kernel for; those of a mapped file come without asking."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.parametrize("num_workers", [0, 1])
@ranks(4)
def test_ranks_that_share_a_sample_read_blocks_of_the_same(rank, num_workers, tmp_path):
    manager = DistributedManager()
    manager.initialize_mesh((2, 2), ("data", "columns"))
    if rank == 0:
        with h5py.File(tmp_path / "flow.h5", "w") as file:
            file["fields"], file["times"] = np.arange(24.0).reshape(4, 6), np.arange(4)
    manager.barrier()
    dataset = DomainDataset(
        Hdf5Dataset(tmp_path / "flow.h5", ["fields", "times"]), {-1: "columns"}, weights={-1: [1, 2]}
    )
    loader = distributed_loader(dataset, batch_size=2, shuffle=False, group="data", num_workers=num_workers)
    ((fields, times),) = loader
    assert times.tolist() == [[0, 1], [2, 3]][manager.group_rank("data")]
    assert torch.equal(
        fields, torch.arange(24.0).double().view(4, 6)[times].split([2, 4], 1)[manager.group_rank("columns")]
    )
    ((cached, _),) = rank_cached_loader(dataset, batch_size=2, shuffle=False, group="data")
    assert torch.equal(cached, fields)


@ranks(2)
def test_a_halo_that_is_read_is_the_one_that_is_exchanged():
    field = np.arange(14.0).reshape(1, 2, 7)
    (block,) = DomainDataset([field], {-1: "world"})[0]
    for boundary in BOUNDARIES:
        (wide,) = DomainDataset([field], {-1: "world"}, halo=(2, 1), boundary=boundary)[0]
        assert torch.equal(wide, halo_exchange(block, (2, 1), -1, boundary=boundary))


@ranks(2)
def test_it_ends_where_a_block_is_empty(rank):
    dataset = DomainDataset([np.arange(18.0).reshape(3, 6)], {-1: "world"}, weights={-1: [1, 0]})
    assert [tuple(block.shape) for (block,) in dataset] == [((6, 0)[rank],)] * 3
    assert torch.equal(dataset[-1][0], dataset[2][0])
    with pytest.raises(IndexError):
        dataset[3]


@ranks(2)
def test_misuse_is_an_error(rank):
    field = np.zeros((3, 4, 6))
    for arrays, dims in (
        ([field, field[:2]], {-1: "world"}),
        ([field], {-3: "world"}),
        ([field], {1: "world"}),
        ([], {}),
    ):
        with pytest.raises(ValueError, match="arrays must have one number of samples, and behind it the dims"):
            DomainDataset(arrays, dims)
    with pytest.raises(ValueError, match="weights must hold one number for each of the 2 ranks of dim -1"):
        DomainDataset([field], {-1: "world"}, weights={-1: [1]})
    with pytest.raises(ValueError, match="boundary must be one of"):
        DomainDataset([field], {-1: "world"}, boundary="constant")
    with pytest.raises(ValueError, match="halo must be a number of entries"):
        DomainDataset([field], {-1: "world"}, halo=-1)
    with pytest.raises(ValueError, match="halo must be at most 5 where a tensor of length 6 along dim -1"):
        DomainDataset([field], {-1: "world"}, halo=6, boundary="reflect")
    assert all_gather_objects(rank) == [0, 1]
