import inspect
import os
import random
import traceback
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distman import DistributedManager, local_rank_zero_first
from distman.collectives import all_gather_objects
from distman.data import TrainingLoader, distributed_loader, rank_cached_loader
from distman.data._loaders import _default_num_workers
from distman.testing import ranks

LOADERS = [distributed_loader, rank_cached_loader]


def numbers(length):
    return TensorDataset(torch.arange(length), torch.arange(float(length)).unsqueeze(1))


class Noisy(Dataset):
    """Samples with noise from all three generators that programs use."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()  # noqa: S311 - no secret


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@ranks(1, 4)
@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("length", [1, 11, 40])
def test_an_epoch_of_training_has_each_sample_once(make, length):
    loader = make(numbers(length), batch_size=3)
    orders = []
    for _ in range(2):
        own, steps = [], 0
        for index, value in loader:
            assert torch.equal(index.double(), value[:, 0].double())
            own += index[: loader.num_own].tolist()
            steps += 1
        everyone = all_gather_objects((own, steps))
        assert {steps for _, steps in everyone} == {len(loader)}
        assert sorted([*chain(*(own for own, _ in everyone))]) == list(range(length))
        assert sum(len(own) for own, _ in everyone) == length
        orders.append([own for own, _ in everyone])
    assert orders[0] != orders[1] or length == 1


@ranks(1, 3)
@pytest.mark.parametrize("make", LOADERS)
def test_the_scaled_loss_is_the_mean_over_the_batch_of_all_ranks(make, world_size):
    loader = make(numbers(10), batch_size=2)
    for _, values in loader:
        scaled = all_gather_objects((loader.loss_scale * values.mean().item(), values.sum().item(), loader.num_own))
        mean = sum(loss for loss, _, _ in scaled) / world_size
        expected = sum(total for _, total, num in scaled if num) / loader.num_total
        assert mean == pytest.approx(expected, rel=1e-12)


@ranks(1, 4)
@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("length", [1, 3, 10])
def test_evaluation_is_in_order_and_complete(make, length):
    loader = make(numbers(length), evaluation=True, batch_size=3)
    own = [index for indices, _ in loader for index in indices.tolist()]
    assert [*chain(*all_gather_objects(own))] == list(range(length))
    assert len(list(loader)) == len(loader)


@ranks(1, 3)
@pytest.mark.parametrize("make", LOADERS)
def test_the_position_within_an_epoch_is_restored(make):
    loader = make(numbers(40), batch_size=3)
    list(loader)
    states, batches = [loader.state_dict()], []
    for indices, _ in loader:
        batches.append(indices.tolist())
        states.append(loader.state_dict())
    following = [indices.tolist() for indices, _ in loader]
    assert states[-1]["epoch"] == 2
    for step, state in enumerate(states):
        again = make(numbers(40), batch_size=3)
        again.load_state_dict(state)
        assert again.state_dict() == state
        expected = batches[step:] or following
        assert [indices.tolist() for indices, _ in again] == expected


@ranks(2)
def test_a_loader_says_what_it_is():
    training = distributed_loader(numbers(11), batch_size=2)
    assert repr(training) == "TrainingLoader(TensorDataset, 3 steps on 2 ranks)"
    evaluation = distributed_loader(numbers(11), batch_size=2, evaluation=True)
    assert repr(evaluation) == "EvaluationLoader(TensorDataset, 3 batches on this rank)"


@ranks(2)
def test_an_epoch_that_was_left_is_over_and_any_epoch_can_be_chosen():
    loader = distributed_loader(numbers(12), batch_size=2)
    first = [indices.tolist() for indices, _ in loader]
    loader.set_epoch(0)
    assert next(iter(loader))[0].tolist() == first[0]
    assert next(iter(loader))[0].tolist() != first[0]
    loader.set_epoch(0)
    assert [indices.tolist() for indices, _ in loader] == first


@ranks(2)
def test_a_position_of_another_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be 0, as saved, got 1"):
        distributed_loader(numbers(12), seed=1).load_state_dict(distributed_loader(numbers(12)).state_dict())


@pytest.fixture
def alone():
    """The manager of a process without a launcher."""
    yield DistributedManager.initialize()
    DistributedManager.cleanup()


@pytest.mark.usefixtures("alone")
def test_a_position_in_another_dataset_is_the_start_of_its_epoch(caplog):
    loader = distributed_loader(numbers(13))
    loader.load_state_dict({"epoch": 3, "position": 4, "seed": 0, "layout": [12]})
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (3, 0)
    assert "epoch 3 starts over: its position was saved with another dataset or shard sizes" in caplog.text


@ranks(2)
def test_workers_and_ranks_draw_different_numbers_and_repeat_them():
    loader = distributed_loader(Noisy(48), batch_size=4, num_workers=2)
    states, epochs = [], []
    for _ in range(2):
        noise = []
        for batch in loader:
            states.append(loader.state_dict())
            noise.append(torch.stack([column.double() for column in batch]))
        epochs.append(noise)
    for kind in (1, 2, 3):
        drawn = torch.cat([batch[kind] for noise in epochs for batch in noise]).tolist()
        everyone = [*chain(*all_gather_objects(drawn))]
        assert len(set(everyone)) == len(everyone) == 2 * 48
    again = distributed_loader(Noisy(48), batch_size=4, num_workers=1)
    again.load_state_dict(states[3])
    resumed = [torch.stack([column.double() for column in batch]) for batch in again]
    assert all(torch.equal(one, other) for one, other in zip(resumed, epochs[0][4:], strict=True))


@ranks(2)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_of_the_program_are_left_alone(num_workers):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for _ in distributed_loader(numbers(12), batch_size=2, num_workers=num_workers):
        pass
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@ranks(2)
def test_an_error_in_a_worker_is_the_datasets_own(rank):
    class Broken(Noisy):
        def __getitem__(self, index):
            if index == 5:
                raise ValueError("sample 5 is broken")
            return index

    loader = distributed_loader(Broken(8), evaluation=True, batch_size=2, num_workers=1)
    if rank == 1:
        with pytest.raises(ValueError, match="sample 5 is broken") as caught:
            list(loader)
        traceback.clear_frames(caught.tb)  # torch waits 5 s for workers of an iterator that is collected as garbage
    else:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@ranks(2)
def test_workers_as_many_as_the_scheduler_gave_cpus(monkeypatch):
    num_cpus = len(os.sched_getaffinity(0))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert _default_num_workers() == 0
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    assert _default_num_workers() == (2 if num_cpus > 1 else 0)
    assert distributed_loader(Noisy(4)).num_workers == _default_num_workers()
    assert distributed_loader(numbers(4)).num_workers == 0
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4096")
    assert _default_num_workers() in (0, num_cpus)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    monkeypatch.setenv("NCPUS", "4")
    assert _default_num_workers() == 0
    monkeypatch.setenv("PBS_JOBID", "17.server")
    assert _default_num_workers() == (2 if num_cpus > 1 else 0)


@ranks(2)
def test_options_that_make_no_sense():
    with pytest.raises(TypeError, match="dataset must be a map-style dataset with a length, got Stream"):
        distributed_loader(Stream())
    with pytest.raises(TypeError, match="generator must be left out"):
        distributed_loader(numbers(3), generator=torch.Generator())
    if "in_order" in inspect.signature(DataLoader).parameters:  # from torch 2.6 on
        for evaluation in (False, True):
            assert len(distributed_loader(numbers(4), evaluation=evaluation, in_order=True)) == 2
            with pytest.raises(TypeError, match="in_order must be left out: num_own"):
                distributed_loader(numbers(4), evaluation=evaluation, in_order=False)
    with pytest.raises(TypeError, match="shuffle must be left out for evaluation"):
        distributed_loader(numbers(3), evaluation=True, shuffle=True)
    with pytest.raises(TypeError, match="drop_last must be left out for evaluation"):
        rank_cached_loader(numbers(3), evaluation=True, drop_last=True)
    with pytest.raises(TypeError, match="num_workers"):
        rank_cached_loader(numbers(3), num_workers=2)


@ranks(2)
def test_what_it_returns_is_a_loader_of_torch():
    loader = distributed_loader(numbers(10), batch_size=2, collate_fn=len)
    assert isinstance(loader, TrainingLoader)
    assert isinstance(loader, DataLoader)
    assert list(loader) == [2, 2, 1]


@ranks(4)
def test_one_rank_of_each_host_builds_the_dataset(rank, tmp_path):
    path = tmp_path / "data.pt"
    with local_rank_zero_first():
        if not path.exists():
            torch.save(torch.arange(10.0), path)
            (tmp_path / f"built by {rank}").touch()
        data = torch.load(path)
    loader = rank_cached_loader(TensorDataset(data), evaluation=True, batch_size=2)
    own = [value for (values,) in loader for value in values.tolist()]
    assert [*chain(*all_gather_objects(own))] == list(range(10))
    DistributedManager().barrier()
    assert [found.name for found in tmp_path.glob("built by *")] == ["built by 0"]


@ranks(1, 2)
@pytest.mark.parametrize("make", LOADERS)
def test_a_loader_is_no_dataset(make):
    with pytest.raises(TypeError, match=r"dataset must be a dataset, got a DataLoader\. Pass loader\.dataset\."):
        make(DataLoader(numbers(4)), batch_size=2)


class Epochs(Dataset):
    def __init__(self):
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.epoch


@ranks(2)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_is_told_the_epoch(num_workers):
    loader = distributed_loader(Epochs(), batch_size=2, num_workers=num_workers)
    assert [[set(batch.tolist()) for batch in loader] for _ in range(2)] == [[{0}, {0}], [{1}, {1}]]
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "position": 4})
    assert [set(batch.tolist()) for batch in loader] == [{5}]
