"""Memory of large results that is used again: never that of a result which is still there."""

import ctypes
import gc
import mmap
import os
import random
import re
import threading
from pathlib import Path

import pytest
import torch

from distman.collectives import _result_memory, all_gather_v, reduce_scatter_v
from distman.collectives._result_memory import new_empty
from distman.testing import ranks
from tests.launch.preloaded import PYTHON
from tests.launch.processes import launch

LARGE = 2**25  # bytes: glibc gives what is larger back to the system at once
LIKE = torch.empty(0, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _nothing_is_kept():
    gc.collect()
    _result_memory._kept.clear()
    yield
    _result_memory._kept.clear()


def test_a_result_is_made_where_one_was_that_is_gone():
    place = new_empty(LIKE, [LARGE + 100]).data_ptr()
    second = new_empty(LIKE, [LARGE])
    third = new_empty(LIKE, [LARGE])
    assert second.data_ptr() == place
    assert third.data_ptr() != place


@pytest.mark.parametrize(
    "part", [lambda one: one[5:], lambda one: one.view(2, -1), lambda one: one.numpy(), torch.Tensor.untyped_storage]
)
def test_memory_is_kept_from_others_as_long_as_somebody_has_a_part_of_it(part):
    held = part(new_empty(LIKE, [LARGE]))
    assert not _result_memory._kept
    del held
    assert len(_result_memory._kept) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16, torch.bool, torch.int16])
@pytest.mark.parametrize("shape", [(LARGE,), (3, 1, LARGE // 3 + 16), (0, 5), (), (7,)])
def test_it_is_what_torch_would_make(dtype, shape):
    like = torch.empty(2, dtype=dtype)
    shape = tuple(length // dtype.itemsize if length > 7 else length for length in shape)  # else it is of bytes
    made, expected = new_empty(like, shape), like.new_empty(shape)
    assert (made.dtype, made.shape, made.stride()) == (dtype, expected.shape, expected.stride())
    assert not made._is_view()
    made.fill_(1)
    assert made.logical_and(made).all()
    assert new_empty(like, shape, torch.uint8).dtype == torch.uint8


class Subclass(torch.Tensor):
    pass


def test_other_tensors_are_made_by_torch():
    assert new_empty(torch.empty(0, device="meta"), [LARGE]).is_meta
    assert type(new_empty(torch.empty(0).as_subclass(Subclass), [LARGE])) is Subclass
    with torch.inference_mode():
        assert new_empty(LIKE, [LARGE]).is_inference()


def test_at_most_so_much_is_kept_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(_result_memory, "_MOST_BYTES", 5 * LARGE)
    results = [new_empty(LIKE, [factor * LARGE]) for factor in (1, 2, 3)]
    while results:
        del results[0]
    assert [len(memory) for memory in _result_memory._kept] == [2 * LARGE, 3 * LARGE]
    _ = new_empty(LIKE, [6 * LARGE])
    del _
    assert not _result_memory._kept


def test_far_larger_memory_is_left_to_larger_results():
    large = new_empty(LIKE, [3 * LARGE])
    place = large.data_ptr()
    del large
    assert new_empty(LIKE, [LARGE]).data_ptr() != place
    assert new_empty(LIKE, [2 * LARGE]).data_ptr() == place


def test_locked_memory_goes_back_to_the_system():
    libc = ctypes.CDLL(None, use_errno=True)
    result = new_empty(LIKE, [LARGE])
    assert libc.mlock(ctypes.c_void_p(result.data_ptr()), 4096) == 0, os.strerror(ctypes.get_errno())
    del result
    assert not _result_memory._kept


WITHOUT_MEMORY = """
import resource, torch
from distman.collectives._result_memory import new_empty
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**24, in_use + 2**24))
try:
    new_empty(torch.empty(0), [2**26])
except RuntimeError as error:
    print(error)
"""


def test_torch_says_that_memory_is_out():
    assert "allocate memory" in launch([PYTHON, "-c", WITHOUT_MEMORY]).stdout


def test_a_forked_child_has_a_copy():
    result = new_empty(LIKE, [LARGE]).fill_(1)
    pid = os.fork()
    if pid == 0:
        result[0] = 2  # by this thread alone: a forked child has none of torch's others
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert result.min().item() == 1


def test_the_memory_is_of_huge_pages_where_the_system_has_them():
    result = new_empty(LIKE, [LARGE + 1]).fill_(1)
    assert ("hg" in flags_of_mapping(result.data_ptr())) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert result.sum().item() == LARGE + 1


def test_a_system_without_huge_pages_has_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # which no kernel knows
    result = new_empty(LIKE, [LARGE]).fill_(1)
    assert "hg" not in flags_of_mapping(result.data_ptr())
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert new_empty(LIKE, [LARGE]).fill_(1).min().item() == 1


def flags_of_mapping(address):
    """What the kernel says of the memory at an address, as of proc_pid_smaps(5)."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []  # as where a sandbox stands in for Linux


def test_threads_that_make_and_drop_results_share_none(monkeypatch):
    monkeypatch.setattr(_result_memory, "_LEAST_BYTES", 2**12)
    monkeypatch.setattr(_result_memory, "_HUGE_PAGE", 2**12)
    monkeypatch.setattr(_result_memory, "_MOST_BYTES", 2**16)
    wrong = []

    def work(number):
        draw = random.Random(number)  # noqa: S311 - a test draws
        held = []
        for step in range(400):
            value = 4 * step + number
            held.append((new_empty(LIKE, [draw.randrange(2**12, 2**15)], torch.int64).fill_(value), value))
            if draw.random() < 0.6:
                result, value = held.pop(draw.randrange(len(held)))
                wrong.extend([value] * (not bool((result == value).all())))
                del result
            held = held[-6:]

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gloo_only("the memory of results does not depend on the backend")
@ranks(2)
def test_results_of_collectives_are_new_tensors_that_may_be_changed(rank):
    rows = LARGE // 4 // 1024
    shard = torch.full((rows, 1024), float(rank), requires_grad=True)
    places = []
    for turn in range(2):
        full = all_gather_v(shard, [rows, rows])
        kept = all_gather_v(shard, [rows, rows])
        full.add_(turn)
        assert full.select(1, 0).tolist() == [turn] * rows + [turn + 1] * rows
        assert kept.select(1, 0).tolist() == [0] * rows + [1] * rows
        (grad,) = torch.autograd.grad(full.sum() + kept.sum(), shard)
        assert grad.eq(4).all()
        assert reduce_scatter_v(full.detach(), [rows, rows]).eq(2 * (turn + rank)).all()
        places.append(full.data_ptr())
        del full, kept, grad
    assert len(set(places)) == 1
