"""From the data that a program passes to a handler to loaders and steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from distman.data import TrainingLoader, distributed_loader, rank_cached_loader
from distman.errors import check_options
from distman.handler._sources import ForeignSource, LoaderSource, NumSamples, Source

# Parameters of the functions that make loaders which are not for the user: the handler passes the first two, all ranks
# train one model, and the last one stands for the options of torch's DataLoader.
_NO_OPTIONS = {"dataset", "evaluation", "group", "loader_kwargs"}


def make_loader(method: str, data: Any, options: Mapping[str, Any], *, cached: bool, evaluation: bool = False) -> Any:
    """Return a loader that distributes a dataset over the ranks, or an iterable as it is."""
    if "group" in options:
        raise TypeError("group must be left out: all ranks train one model. Call the functions of distman.data for it.")
    if isinstance(data, str) or not (hasattr(data, "__getitem__") or isinstance(data, Iterable)):
        raise TypeError(
            f"data must be a dataset or an iterable of batches, got {data!r}. Make one of your files first."
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"data must be re-iterable, once per epoch, got the iterator {data!r}. Pass a DataLoader, or an object "
            "whose __iter__ starts over."
        )
    if evaluation and isinstance(data, TrainingLoader):
        raise TypeError(
            "data to validate with must be read in order, got a TrainingLoader. Make it with evaluation=True."
        )
    if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
        _check_no_options(data, options, cached=cached)
        return data
    if isinstance(data, list | tuple) and {"batch_size", "batch_sampler"}.isdisjoint(options):
        raise TypeError(
            f"data must not be a {type(data).__name__} without batch_size, which could hold samples or batches. Pass "
            "batch_size for samples, or DataLoader(batches, batch_size=None) for batches that each rank has made."
        )
    make = rank_cached_loader if cached else distributed_loader
    check_options(options, _options_of(make), method)
    return make(data, evaluation=evaluation, **options)


def make_evaluation_loader(method: str, data: Any, options: Mapping[str, Any]) -> Any:
    """Return a loader that reads each sample of a dataset once and in order, or an iterable as it is."""
    is_dataset = hasattr(data, "__getitem__") and not isinstance(data, DataLoader | list | tuple)
    return make_loader(
        method, data, {"batch_size": 64, **options} if is_dataset else options, cached=False, evaluation=True
    )


def make_source(data: Any, num_samples: NumSamples | None) -> Source:
    return LoaderSource(data, num_samples) if isinstance(data, TrainingLoader) else ForeignSource(data, num_samples)


def _check_no_options(data: Any, options: Mapping[str, Any], *, cached: bool) -> None:
    given = [name for name in options if name != "seed"]  # the handler passes its own seed
    if cached or given:
        raise TypeError(
            f"loader options must be passed with a dataset, got {given or ['cached']} with a {type(data).__name__}. "
            "Set them where you make it."
        )


def _options_of(make: Callable[..., Any]) -> set[str]:
    """Return the names of the options that a user may pass for a loader."""
    known = {"cached", *inspect.signature(make).parameters}
    if "loader_kwargs" in known:
        known |= {*inspect.signature(DataLoader).parameters}
    return known - _NO_OPTIONS
