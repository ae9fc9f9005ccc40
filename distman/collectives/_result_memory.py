"""Memory for large results on the CPU, used again when they are gone.

The system hands out new memory page by page, as each is first written to. That takes longer than to copy into it what
other ranks send: 64 MB from another rank take 12 ms in memory used before, and 40 in new memory. Of huge pages there
are fewer: a copy of 64 MB to new memory takes 11 ms instead of 24, and one to memory that the system was free to take
meanwhile 6 instead of 15.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from distman._base.process_state import puts_back

_LEAST_BYTES = 2**21  # smaller ones the C library keeps for the program, once it has freed one
_MOST_BYTES = 2**30  # that are kept: the system takes them back when memory is short
_MOST_LARGER = 2  # times what is asked for, that memory used again may be
_HUGE_PAGE = 2**21  # bytes, of most systems: of other lengths, the last one would be small pages

_kept: deque[mmap.mmap] = deque()
"""The memory of results that are gone. All that is done to it is one step: a result may end in any thread, at any
time."""


@puts_back
def _drop_all() -> None:
    _kept.clear()


def new_empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return what ``like.new_empty(shape, dtype=dtype)`` does, in memory used before where that is faster."""
    dtype = dtype or like.dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    is_plain = type(like) in (torch.Tensor, torch.nn.Parameter) and like.device.type == "cpu"
    memory = _take(num_bytes) if is_plain and num_bytes >= _LEAST_BYTES else None
    if memory is None:
        return like.new_empty(shape, dtype=dtype)
    view = memoryview(memory)  # which the tensor holds as long as it, or one that shares its memory, is there
    weakref.finalize(view, _give_back, memory).atexit = False
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    result = torch.empty(0, dtype=dtype, device="cpu")
    result.set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]  # torch's stub knows no storage here
    return result


def _take(num_bytes: int) -> mmap.mmap | None:
    """Return memory of so many bytes or somewhat more; None where the system has nothing that can be kept."""
    if not hasattr(mmap, "MADV_FREE"):
        return None
    for memory in sorted(_kept, key=len):
        if num_bytes <= len(memory) <= _MOST_LARGER * num_bytes:
            with contextlib.suppress(ValueError):  # another thread has taken it
                _kept.remove(memory)
                return memory
    try:
        num_pages = -(-num_bytes // _HUGE_PAGE)
        memory = mmap.mmap(-1, num_pages * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch says it better
        _kept.clear()
        return None
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap) -> None:
    """Keep the memory of a result, the oldest no more where it gets too much; its pages are the system's to take."""
    try:
        memory.madvise(mmap.MADV_FREE)
    except OSError:  # it is locked, say: then the system could not take it
        return
    _kept.append(memory)
    with contextlib.suppress(IndexError):  # another thread has dropped it
        while sum(map(len, tuple(_kept))) > _MOST_BYTES:
            _kept.popleft()
