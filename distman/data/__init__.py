"""Loaders that distribute a dataset over the ranks."""

from __future__ import annotations

from distman.data._batches import EvaluationBatches, SampledBatches, ShardBatches, TrainingBatches
from distman.data._cached import RankCachedDataset, rank_cached_loader
from distman.data._distributed_stream import DistributedStream, distributed_stream
from distman.data._hdf5 import Hdf5Dataset
from distman.data._loaders import EvaluationLoader, TrainingLoader, default_num_workers, distributed_loader

__all__ = [
    "DistributedStream",
    "EvaluationBatches",
    "EvaluationLoader",
    "Hdf5Dataset",
    "RankCachedDataset",
    "SampledBatches",
    "ShardBatches",
    "TrainingBatches",
    "TrainingLoader",
    "default_num_workers",
    "distributed_loader",
    "distributed_stream",
    "rank_cached_loader",
]
