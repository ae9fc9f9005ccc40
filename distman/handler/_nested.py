"""Nested tensors: concatenate batches of them, move them to host memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from distman._torch_internals import tree_flatten, tree_map, tree_unflatten


def concatenate(batches: Sequence[Any]) -> Any:
    """Concatenate batches of the same structure; return None if there are none.

    Args:
        batches: Tensors of shape ``(n, *)``, or tuples, lists and mappings of such. Lists of other things are
            concatenated too, and single values become a list.

    Raises:
        ValueError: The batches differ in structure.
    """
    if not batches:
        return None
    flat = [tree_flatten(batch, is_leaf=_is_list_of_values) for batch in batches]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ValueError(
            f"all batches must have the same structure, got {' and '.join(sorted({str(other) for _, other in flat}))}. "
            "Return the same structure for each batch."
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_concatenate_leaves(column) for column in columns], structure)


def on_host(tree: Any) -> Any:
    """Return a nested structure with its tensors in host memory."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _is_list_of_values(node: Any) -> bool:
    return isinstance(node, list) and not any(isinstance(one, torch.Tensor | list | tuple | dict) for one in node)


def _concatenate_leaves(column: Sequence[Any]) -> Any:
    if isinstance(column[0], torch.Tensor):
        return torch.cat([one if one.ndim else one.reshape(1) for one in column])
    return [*itertools.chain(*column)] if isinstance(column[0], list) else [*column]
