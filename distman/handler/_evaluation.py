"""Evaluation of a model on a dataset that is distributed over the ranks, and predictions, one for each sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distman._coordination.wait_scope import collective
from distman._torch_internals import tree_flatten, tree_map, tree_unflatten
from distman.collectives import gather_objects
from distman.data import EvaluationLoader
from distman.decorators import on_rank
from distman.handler._accumulators import Accumulators, Metric
from distman.handler._objective import Forward, Objective, evaluating
from distman.manager import DistributedManager
from distman.training import NumSamples, check_loss, count_samples, counted, drawn_numbers, to_device

Pad = Callable[[list[torch.Tensor]], Any]
_PARTS = torch.Tensor, np.ndarray, Mapping, list, tuple, type(None)  # of outputs, other than values of single samples
_Part = tuple[int | None, Any]  # the number of samples in a batch, if it is known, and a part of its outputs


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
    accumulators = Accumulators(metrics)
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
    forward: Forward,
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
            outputs = tree_map(_on_host, forward(model, to_device(batch, DistributedManager().device))[0])
            if samples is not None:
                outputs = _checked(None if plan is None else number, [*samples(outputs)])
            own.append((number, outputs))
    everyone = gather_objects(own)
    parts = [part for rank in everyone or [] for part in rank]
    if samples is not None:
        return on_rank(0, broadcast=all_ranks)(lambda: [one for _, own in parts for one in own] or None)()
    return on_rank(0, broadcast=all_ranks)(_join)(parts, pad)


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


class _Samples(list[torch.Tensor]):
    """The samples of a nested tensor."""


def _join(batches: Sequence[_Part], pad: Pad | None) -> Any:
    """Join the outputs of batches, of one structure; return None if there are none."""
    if not batches:
        return None
    flat = [tree_flatten(outputs, is_leaf=_is_sequence) for _, outputs in batches]
    _check_same([structure for _, structure in flat])
    rows = [[(num, leaf) for leaf in leaves] for (num, _), (leaves, _) in zip(batches, flat, strict=True)]
    return tree_unflatten([_join_leaves(column, pad) for column in zip(*rows, strict=True)], flat[0][1])


def _on_host(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _Samples(one.cpu() for one in leaf.unbind()) if leaf.is_nested else leaf.cpu()


def _checked(num: int | None, entries: Any) -> Any:
    is_sequence = hasattr(entries, "__len__") and not isinstance(entries, str | Mapping)
    if num is None or (is_sequence and getattr(entries, "shape", None) != () and len(entries) == num):
        return entries
    found = f"a {type(entries).__name__}" + (f" of shape {tuple(entries.shape)}" if hasattr(entries, "shape") else "")
    found += f" of {len(entries)}" if _is_sequence(entries) else ""
    raise ValueError(
        f"outputs must have one entry for each sample, got {found} for a batch of {num}. Return tensors with the "
        "samples in their first dim, or lists of one entry for each; or pass samples=, a function that makes such a "
        "list of the outputs of a batch."
    )


def _join_leaves(column: Sequence[_Part], pad: Pad | None) -> Any:
    _check_same([type(leaf).__name__ if _is_sequence(leaf) else "no list" for _, leaf in column])
    if _is_sequence(column[0][1]):
        return _join_sequences(column, pad)
    if all(leaf is None for _, leaf in column):
        return None
    if not all(isinstance(leaf, torch.Tensor | np.ndarray) for _, leaf in column):
        are_one = (num in (1, None) and not isinstance(leaf, _Samples) for num, leaf in column)
        pairs = zip(are_one, column, strict=True)
        return _rows([[leaf] if is_one else _checked(num, leaf) for is_one, (num, leaf) in pairs])
    tensors = [_checked(num, leaf if leaf.ndim or num not in (1, None) else leaf.reshape(1)) for num, leaf in column]
    are_arrays = any(isinstance(one, np.ndarray) for one in tensors)
    if len({one.shape[1:] for one in tensors}) == 1:
        return np.concatenate(tensors) if are_arrays else torch.cat(tensors)
    return _rows(tensors) if pad is None or are_arrays else pad(_rows(tensors))


def _rows(batches: Sequence[Any]) -> list[Any]:
    return [*itertools.chain(*batches)]


def _join_sequences(column: Sequence[_Part], pad: Pad | None) -> Any:
    """Join lists, or tuples, of one entry per sample, or of several outputs, whichever these are."""
    sequences = [one for _, one in column]
    are_samples = all(num is None or len(one) == num for num, one in column)
    entries = [entry for one in sequences for entry in one]
    is_outputs = bool(entries) and all(isinstance(one, _PARTS) for one in entries)
    if not is_outputs or (are_samples and any(isinstance(one, Mapping) for one in entries)):
        return _rows([_checked(num, one) for num, one in column])
    if are_samples and len({len(one) for one in sequences}) > 1:
        return entries
    try:
        _check_same([f"a {type(one).__name__} of {len(one)}" for one in sequences])
        parts = [_join([(num, one[index]) for num, one in column], pad) for index in range(len(sequences[0]))]
    except ValueError:
        if are_samples and column[0][0] is not None:
            return entries
        raise
    if are_samples and column[0][0] is not None and isinstance(sequences[0], list):
        raise ValueError(
            f"a list must have one entry for each sample, or be one of several outputs, got one of {len(parts)} for "
            f"batches of {column[0][0]}, which may be either. Return a tuple of outputs; or pass samples=list if it "
            "has the samples."
        )
    return type(sequences[0])(parts)


def _check_same(structures: Sequence[object]) -> None:
    if any(one != structures[0] for one in structures):
        found = sorted({str(one) for one in structures})
        raise ValueError(
            f"all batches must have the same structure, got {' and '.join(found)}. Return the same structure for each "
            "batch."
        )


def _is_sequence(node: object) -> bool:
    return type(node) in (list, tuple)
