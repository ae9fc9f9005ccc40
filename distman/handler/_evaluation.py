"""Evaluation of a model on a dataset distributed over the ranks: each sample once, in order, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman.collectives._objects import gather_objects
from distman.data import EvaluationLoader
from distman.decorators import on_rank
from distman.handler._accumulators import Accumulators, Metric
from distman.handler._nested import Pad, checked, join, on_host
from distman.handler._objective import Objective, evaluating
from distman.manager import DistributedManager
from distman.training._engine import check_loss, to_device
from distman.training._sources import NumSamples, count_samples, counted, drawn_numbers


@collective
@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    objective: Objective,
    batches: Iterable[Any],
    metrics: Mapping[str, Metric],
    *,
    dtype: torch.dtype | None = None,
    num_samples: NumSamples | None = None,
) -> dict[str, float]:
    """Return the loss and the metrics over all samples, the same on all ranks. Collective."""
    accumulators = Accumulators(metrics, keeps_all=True)
    with evaluating(model, dtype):
        for batch, number in _counted(batches, num_samples):
            outcome = objective(model, to_device(batch, DistributedManager().device))
            check_loss(outcome.loss)
            accumulators.add(accumulators.measure(outcome, number), number)
    return accumulators.compute()


@collective
@torch.no_grad()
def predict(
    model: torch.nn.Module,
    forward: Callable[[torch.nn.Module, Any], Any],
    batches: Iterable[Any],
    *,
    samples: Callable[[Any], Any] | None = None,
    pad: Pad | None = None,
    all_ranks: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the model's outputs for each sample, see :meth:`NNHandler.predict`. Collective."""
    own = []
    with evaluating(model, dtype):
        for batch, number in _numbered(batches):
            outputs = on_host(forward(model, to_device(batch, DistributedManager().device)))
            if samples is not None:
                outputs = checked(number if _is_planned(batches) else None, [*samples(outputs)])
            own.append((number, outputs))
    everyone = gather_objects(own)
    parts = [part for rank in everyone or [] for part in rank]
    if samples is not None:
        return on_rank(0, broadcast=all_ranks)(lambda: [one for _, own in parts for one in own] or None)()
    return on_rank(0, broadcast=all_ranks)(join)(parts, pad)


def _is_planned(batches: Iterable[Any]) -> bool:
    return isinstance(batches, EvaluationLoader) or drawn_numbers(batches) is not None


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Yield batches with their numbers of samples, of which each has one entry in the outputs."""
    if isinstance(batches, EvaluationLoader):
        yield from _counted(batches, None)
        return
    numbers = drawn_numbers(batches)
    for index, batch in enumerate(batches):
        yield batch, _num_in(batch) if numbers is None else numbers(index)


def _num_in(batch: Any) -> int:
    """Return how many samples a batch seems to have: the length of its first tensor, or list."""
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    if parts and all(isinstance(one, Mapping) for one in parts):
        return len(batch)
    tensors = [one for one in parts if isinstance(one, torch.Tensor) and one.ndim]
    lists = [one for one in parts if isinstance(one, list | tuple)]
    return len([*tensors, *lists][0]) if tensors or lists else count_samples(batch)


def _counted(batches: Iterable[Any], num_samples: NumSamples | None) -> Iterator[tuple[Any, int]]:
    """Yield batches with their numbers of samples: from the loader's plan if it has one, not from the batch."""
    if num_samples is not None or not isinstance(batches, EvaluationLoader):
        yield from ((batch, counted(batch, num_samples or count_samples)) for batch in batches)
        return
    plan = batches.batches
    for step, batch in enumerate(batches):
        yield batch, min(plan.batch_size, len(plan.own) - step * plan.batch_size)
