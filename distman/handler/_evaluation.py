"""Evaluation of a model on a dataset distributed over the ranks: each sample once, in order, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman.collectives import gather_objects
from distman.data import EvaluationLoader
from distman.decorators import on_rank
from distman.handler._accumulators import Accumulators, Metric
from distman.handler._nested import Pad, checked, join, on_host
from distman.handler._objective import Objective, evaluating
from distman.manager import DistributedManager
from distman.training import NumSamples, check_loss, count_samples, counted, drawn_numbers, to_device


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
        plan = _plan_of(batches) if isinstance(batches, EvaluationLoader) and num_samples is None else None
        for index, batch in enumerate(batches):
            number = plan(index) if plan is not None else counted(batch, num_samples or count_samples)
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
    own, plan = [], _plan_of(batches)
    with evaluating(model, dtype):
        for index, batch in enumerate(batches):
            number = _num_in(batch) if plan is None else plan(index)
            outputs = on_host(forward(model, to_device(batch, DistributedManager().device)))
            if samples is not None:
                outputs = checked(None if plan is None else number, [*samples(outputs)])
            own.append((number, outputs))
    everyone = gather_objects(own)
    parts = [part for rank in everyone or [] for part in rank]
    if samples is not None:
        return on_rank(0, broadcast=all_ranks)(lambda: [one for _, own in parts for one in own] or None)()
    return on_rank(0, broadcast=all_ranks)(join)(parts, pad)


def _plan_of(batches: Iterable[Any]) -> Callable[[int], int] | None:
    """Return a function that says how many samples a loader draws for each batch; None if that is unknown."""
    if not isinstance(batches, EvaluationLoader):
        return drawn_numbers(batches)
    plan = batches.batches
    return lambda index: min(plan.batch_size, len(plan.own) - index * plan.batch_size)


def _num_in(batch: Any) -> int:
    """Return how many samples a batch seems to have: the length of its first tensor, or list."""
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    if parts and all(isinstance(one, Mapping) for one in parts):
        return len(batch)
    tensors = [one for one in parts if isinstance(one, torch.Tensor) and one.ndim]
    lists = [one for one in parts if isinstance(one, list | tuple)]
    return len([*tensors, *lists][0]) if tensors or lists else count_samples(batch)
