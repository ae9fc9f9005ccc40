"""What the public functions do where nobody has initialized the manager: one rule for all of them.

In a process that is alone they work alone, or ask for the manager. Where a launcher or a process group of torch's says
that there are other ranks, all of them ask for it: none goes on alone, with data that differ from rank to rank.
"""

import importlib
import os

import pytest
import torch

from distman import DistributedManager, NotInitializedError, fft
from distman.checkpoint import (
    CheckpointFolder,
    load,
    load_sharded,
    model_state,
    save,
    save_sharded,
)
from distman.collectives import (
    all_gather_objects,
    all_gather_v,
    all_to_all_v,
    broadcast_data,
    broadcast_if_ddp,
    distributed_transpose,
    fused_all_reduce,
    gather_objects,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.data import (
    DistributedStream,
    RankCachedDataset,
    distributed_loader,
    distributed_stream,
    rank_cached_loader,
)
from distman.decorators import (
    local_rank_zero_first,
    on_local_rank,
    on_rank,
    rank_zero_first,
    rank_zero_only,
)
from distman.handler import Stepper
from distman.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    mark_module_as_shared,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from distman.metrics import aggregate_loss, aggregate_metrics, reduce_loss
from distman.score import VariancePreserving, log_likelihood, sample
from distman.testing import fake_environment, ranks

SQUARE = torch.ones(4, 4)
LINEAR = torch.nn.Linear(2, 2)
DATA = torch.utils.data.TensorDataset(SQUARE)


def enter(block):
    with block:
        return "alone"


def score(_t, x):
    return -x


TRANSFORMS = [
    name
    for name in fft.__all__
    if name.startswith(("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")) and not name.endswith(("freq", "shift"))
]

# What asks the manager, always.
NEEDS_MANAGER = {
    "all_gather_objects": lambda _: all_gather_objects(1),
    "all_gather_v": lambda _: all_gather_v(SQUARE),
    "all_to_all_v": lambda _: all_to_all_v(SQUARE, [[2, 2], [2, 2]]),
    "broadcast_data": lambda _: broadcast_data(1),
    "distributed_transpose": lambda _: distributed_transpose(SQUARE, 0, 1),
    "fused_all_reduce": lambda _: fused_all_reduce(SQUARE),
    "gather_objects": lambda _: gather_objects(1),
    "gather_v": lambda _: gather_v(SQUARE),
    "indexed_all_to_all_v": lambda _: indexed_all_to_all_v(SQUARE, [torch.arange(2)] * 2, [[2, 2], [2, 2]]),
    "reduce_scatter_v": lambda _: reduce_scatter_v(SQUARE, [2, 2]),
    "scatter_v": lambda _: scatter_v(SQUARE, [2, 2]),
    "aggregate_loss": lambda _: aggregate_loss(1.0),
    "aggregate_metrics": lambda _: aggregate_metrics({"loss": 1.0}),
    "reduce_loss": lambda _: reduce_loss(1.0),
    "copy_to_parallel_region": lambda _: copy_to_parallel_region(SQUARE),
    "gather_from_parallel_region": lambda _: gather_from_parallel_region(SQUARE),
    "mark_module_as_shared": lambda _: mark_module_as_shared(torch.nn.Linear(1, 1)),
    "reduce_from_parallel_region": lambda _: reduce_from_parallel_region(SQUARE),
    "scatter_to_parallel_region": lambda _: scatter_to_parallel_region(SQUARE),
    "DistributedRFFT2": lambda _: fft.DistributedRFFT2.apply(SQUARE, (4, 4), (0, 1)),
    "DistributedIRFFT2": lambda _: fft.DistributedIRFFT2.apply(SQUARE, (4, 4), (0, 1)),
    "DistributedAFNO": lambda _: fft.DistributedAFNO((4, 4), 1, patch_size=2, embed_dim=4),
    "Stepper": lambda _: Stepper(LINEAR, torch.optim.SGD(LINEAR.parameters())),
    **{name: lambda _, name=name: getattr(fft, name)(SQUARE) for name in TRANSFORMS},
    "distributed_loader": lambda _: distributed_loader(DATA, batch_size=2),
    "distributed_stream": lambda _: distributed_stream([1, 2]),
    "DistributedStream": lambda _: DistributedStream([1, 2]),
    "rank_cached_loader": lambda _: rank_cached_loader(DATA, batch_size=2),
    "RankCachedDataset": lambda _: RankCachedDataset(DATA),
    "sample": lambda _: sample(score, VariancePreserving(), (4, 2)),
    "log_likelihood": lambda _: log_likelihood(score, VariancePreserving(), SQUARE),
    "DistributedManager": lambda _: DistributedManager(),
}

# What works, too, in a process that is alone.
WORKS_ALONE = {
    "broadcast_if_ddp": lambda _: broadcast_if_ddp(1),
    "on_rank": lambda _: on_rank(0)(os.getpid)(),
    "on_local_rank": lambda _: on_local_rank(0)(os.getpid)(),
    "rank_zero_only": lambda _: rank_zero_only(os.getpid)(),
    "rank_zero_first": lambda _: enter(rank_zero_first()),
    "local_rank_zero_first": lambda _: enter(local_rank_zero_first()),
    "save": lambda path: save({"a": SQUARE}, path / "new.pt"),
    "load": lambda path: load(path / "one.pt"),
    "load_sharded": lambda path: load_sharded(model_state(LINEAR), path / "sharded"),
    "save_sharded": lambda path: save_sharded(model_state(LINEAR), path / "new"),
    "CheckpointFolder": lambda path: CheckpointFolder(path / "folder").load_latest(),
}

# What asks nobody, has no function that works by itself, or initializes the manager.
ASKS_NOBODY = {
    *("load_model_state", "model_state", "unmark_module_as_shared", "parallel_on_all_devices"),
    *("EvaluationLoader", "TrainingLoader", "Hdf5Dataset", "PendingSave", "FusedWork", "GroupLike", "random_stream"),
    *("SDE", "VarianceExploding", "VariancePreserving", "denoising_loss", "guided_score", "score"),
    *("ParallelExecutor", "as_cpu", "parallelize_on_gpus", "initialize_ddp"),
    *("Callback", "EarlyStopping", "History", "ModelCheckpoint", "NNHandler", "Preempted"),
    "ReplicaCheck",
    *("Tracker", "JsonLinesTracker", "MLflowTracker", "TensorBoardTracker", "WandbTracker"),
}


@pytest.fixture
def files(tmp_path):
    """A folder with a checkpoint of each kind."""
    save({"a": SQUARE}, tmp_path / "one.pt")
    save_sharded(model_state(LINEAR), tmp_path / "sharded")
    CheckpointFolder(tmp_path / "folder", background=False).save({"a": SQUARE}, 1)
    return tmp_path


def test_every_public_name_has_its_place_here():
    modules = ("checkpoint", "collectives", "data", "decorators", "executor", "fft", "handler", "manager", "mappings")
    public = {
        name
        for module in (*modules, "metrics", "score")
        for name in importlib.import_module(f"distman.{module}").__all__
    }
    assert {*NEEDS_MANAGER, *WORKS_ALONE, *ASKS_NOBODY} == public


def complaint(function, path):
    """Return how a function asks for the manager; None where it does not."""
    try:
        function(path)
    except NotInitializedError as error:
        return str(error)
    return None


def test_in_a_process_that_is_alone_some_work_and_some_ask(files):
    for name, function in WORKS_ALONE.items():
        assert complaint(function, files) is None, name
    for name, function in NEEDS_MANAGER.items():
        assert "Call DistributedManager.initialize() once at the start" in str(complaint(function, files)), name


@pytest.mark.parametrize("has_launcher", [False, True])
@ranks(1, 2, manager=False)
def test_beside_a_group_of_torch_all_ask(has_launcher, files):
    if not has_launcher:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[variable]
    before = sorted(files.rglob("*"))
    for name, function in (NEEDS_MANAGER | WORKS_ALONE).items():
        assert "got a process group alone. Call DistributedManager.init" in str(complaint(function, files)), name
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize("launcher", ["env", "torchrun", "slurm", "openmpi"])
def test_under_a_launcher_all_ask(launcher, files, monkeypatch):
    for variable, value in fake_environment(launcher, nodes=1, tasks=2)[1].items():
        monkeypatch.setenv(variable, value)
    for name, function in (NEEDS_MANAGER | WORKS_ALONE).items():
        assert "Call DistributedManager.initialize() once at the start" in str(complaint(function, files)), name


@ranks(2, manager=False)
def test_once_the_group_is_adopted_they_work_on_all_ranks(rank, files):
    DistributedManager.initialize(device="cpu")
    assert broadcast_if_ddp(rank) == 0
    for function in WORKS_ALONE.values():
        function(files)
    assert (files / "new.pt").exists()


def test_find_says_whether_there_is_a_manager():
    assert DistributedManager.find() is None
    DistributedManager.initialize(device="cpu")
    assert DistributedManager.find().rank == 0
