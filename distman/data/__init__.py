"""Loaders that distribute a dataset over the ranks."""

from __future__ import annotations

# What is imported as itself is for other parts of the package.
from distman.data._cached import Hdf5Dataset, RankCachedDataset, rank_cached_loader
from distman.data._distributed_stream import DistributedStream, distributed_stream
from distman.data._loaders import EvaluationLoader, TrainingLoader, distributed_loader, length_of as length_of
from distman.data._randomness import (
    generators_preserved as generators_preserved,
    generators_state as generators_state,
    set_generators_state as set_generators_state,
    set_states_of as set_states_of,
    states_of as states_of,
)

__all__ = [
    "DistributedStream",
    "EvaluationLoader",
    "Hdf5Dataset",
    "RankCachedDataset",
    "TrainingLoader",
    "distributed_loader",
    "distributed_stream",
    "rank_cached_loader",
]
