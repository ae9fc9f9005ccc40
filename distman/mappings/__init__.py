"""Into a parallel region and out of it: pairs of operations for models that are split over a group.

They serve computations that are replicated on all ranks outside the region, with one loss that every rank holds: the
gradients are those of that one loss, not of the sum over ranks that :mod:`distman.collectives` differentiates.

Source:
    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
    section 3, operators f and g.
"""

from __future__ import annotations

# What is imported as itself is for other parts of the package.
from distman.mappings._parallel_regions import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_region as scatter_region,
    scatter_to_parallel_region,
)
from distman.mappings._shared_parameters import mark_module_as_shared, unmark_module_as_shared

__all__ = [
    "copy_to_parallel_region",
    "gather_from_parallel_region",
    "mark_module_as_shared",
    "reduce_from_parallel_region",
    "scatter_to_parallel_region",
    "unmark_module_as_shared",
]
