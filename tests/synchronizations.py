"""A count of what makes the host wait for a GPU, by calls on tensors that stand for the GPU's, on the CPU.

Every read of a value counts, of whatever tensor: none of them is none on a GPU. A copy between a GPU and memory that is
not pinned waits too; that is not seen on the CPU, but by `torch.cuda.set_sync_debug_mode` where there is a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"tolist", "numpy", "__array__", "cpu"}
"""Methods of a tensor that need its values on the host, and on a CPU reach no operator of torch."""
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive"}
"""Operators whose result, or its shape, the host has to know."""


ON_THE_HOST = {"all_gather_numbers", "as_bytes", "broadcast_numbers", "__iter__"}
"""Functions of the package that read what is never on a GPU: numbers sent over the CPU, pieces of a host, indices."""


class Synchronizations(TorchFunctionMode):
    """Counts them in a block, by name.

    Example:
        >>> with Synchronizations() as counted:
        ...     bool(torch.ones(1)), torch.ones(3).tolist()
        >>> counted.of
        Counter({'_local_scalar_dense': 1, 'tolist': 1})
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        self._operators = _Operators(self.of)

    def __enter__(self) -> Synchronizations:
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._operators.__exit__(*raised)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a method that reads a tensor."""
        name = getattr(function, "__name__", "")
        is_read = name in READS or (name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values()))
        if is_read and sys._getframe(1).f_code.co_name not in ON_THE_HOST:
            self.of[name] += 1
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, of: Counter[str]) -> None:
        super().__init__()
        self._of = of

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if name in WAITS or by_mask or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            self._of[name] += 1
        return operator(*args, **(kwargs or {}))
