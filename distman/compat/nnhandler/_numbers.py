"""``nn_handler.utils.ddp_helpers``: numbers over all ranks, data from one of them, and loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from distman import collectives, data, metrics
from distman.compat.nnhandler._parallel import on_rank
from distman.compat.nnhandler._start import find_job, start

T = TypeVar("T")


def aggregate_metrics(metrics_dict: Mapping[str, float], world_size: int, device: object = None) -> dict[str, float]:
    """Return the mean of each metric over all ranks; one that is NaN is left out on its rank.

    Collective. Blocking.

    Args:
        metrics_dict: This rank's metrics by name.
        world_size: Number of ranks; with 1 the metrics are returned as they are.
        device: Makes no difference.
    """
    is_alone = world_size <= 1 or find_job() is None
    return dict(metrics_dict) if is_alone else metrics.aggregate_metrics(metrics_dict)


def aggregate_loss(loss_value: float, world_size: int, device: object = None) -> float:
    """Return the mean loss over all ranks; one that is NaN is left out on its rank.

    Collective. Blocking. The arguments are those of :func:`aggregate_metrics`.
    """
    return loss_value if world_size <= 1 or find_job() is None else metrics.aggregate_loss(loss_value)


def broadcast_data(data: T, src: int = 0) -> T:
    """Return one rank's data on all ranks; a tensor of the same shape and type is written in place.

    Collective. Blocking.

    Args:
        data: On ``src`` anything that can be pickled; elsewhere a tensor to receive, or anything.
        src: The rank whose data it is.
    """
    if find_job() is None:
        return data
    received = collectives.broadcast_data(data, src)
    if not (isinstance(data, torch.Tensor) and isinstance(received, torch.Tensor)) or data is received:
        return received
    if (data.shape, data.dtype) != (received.shape, received.dtype):
        return received
    with torch.no_grad():
        data.copy_(received)
    return data


def _create_distributed_loader(
    dataset: Dataset[Any],
    loader_kwargs: Mapping[str, Any],
    device: object = None,
    log_fn: Callable[[str], object] | None = None,
    is_eval: bool = False,
) -> tuple[DataLoader[Any], EpochSetter]:
    """Return a loader of this rank's part of a dataset, and what has the ``set_epoch`` of its sampler.

    Local.

    Args:
        dataset: The dataset, the same on all ranks.
        loader_kwargs: Options of the loader; a sampler is left out. In training, ``drop_last`` is True by default.
        device: Makes no difference.
        log_fn: Is called with a line on what was made.
        is_eval: Load for evaluation: each sample once, in order.
    """
    options = {name: value for name, value in loader_kwargs.items() if name not in ("sampler", "batch_sampler")}
    return _create(data.distributed_loader, dataset, {"drop_last": not is_eval, **options}, log_fn, is_eval=is_eval)


def _create_rank_cached_dataloader(
    dataset: Dataset[Any],
    loader_kwargs: Mapping[str, Any],
    device: object = None,
    log_fn: Callable[[str], object] | None = None,
    is_eval: bool = False,
) -> tuple[DataLoader[Any], EpochSetter]:
    """Return a loader of this rank's shard of a dataset, kept in memory, and what has its ``set_epoch``.

    Local. The arguments are those of :func:`_create_distributed_loader`.
    """
    return _create(data.rank_cached_loader, dataset, of_cache(loader_kwargs), log_fn, is_eval=is_eval)


def of_cache(loader_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a loader of what is in memory has."""
    return {
        name: value for name, value in loader_kwargs.items() if name in ("batch_size", "shuffle", "drop_last", "seed")
    }


def _create(
    make: Callable[..., DataLoader[Any]],
    dataset: Dataset[Any],
    options: Mapping[str, Any],
    log_fn: Callable[[str], object] | None,
    *,
    is_eval: bool,
) -> tuple[DataLoader[Any], EpochSetter]:
    start()
    loader = make(dataset, evaluation=is_eval, **options)
    if log_fn is not None:
        log_fn(
            f"loader for {'evaluation' if is_eval else 'training'}: {len(loader)} batches on this rank, {dict(options)}"
        )
    return loader, EpochSetter(loader)


class EpochSetter:
    """What is left of a sampler: it sets the epoch of a loader for training.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._set_epoch = loader.set_epoch if isinstance(loader, data.TrainingLoader) else None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; the order of an evaluation is the same in all.

        Local.
        """
        if self._set_epoch is not None:
            self._set_epoch(epoch)


def make_train_val_indices(
    n_items: int, val_fraction: float = 0.1, seed: int = 1234, save_path: str | None = None, overwrite: bool = False
) -> tuple[Any, Any]:
    """Return the indices of samples to train and to validate with, as NumPy arrays, the same on all ranks.

    Collective. Rank 0 draws them, or reads them from ``save_path`` if that is there and ``overwrite`` is False.
    """
    import numpy as np  # torch works without it

    def split() -> tuple[Any, Any]:
        if save_path and Path(save_path).exists() and not overwrite:
            saved = np.load(save_path)
            return saved["train_idx"], saved["val_idx"]
        order = np.random.default_rng(seed).permutation(n_items)
        first = round(val_fraction * n_items)
        indices = np.sort(order[first:]), np.sort(order[:first])
        if save_path:
            np.savez_compressed(save_path, train_idx=indices[0], val_idx=indices[1])
        return indices

    return broadcast_data(on_rank(0)(split)() or (None, None))
