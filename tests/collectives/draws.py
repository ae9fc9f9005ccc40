"""Exchanges that are drawn at random, each compared with the same computation on one process.

``python -m tests.collectives.draws --cases 5000 --seed 1`` draws so many, and ``test_draws.py`` some.
"""

import argparse
import os
import random
import sys
from collections import deque

import numpy as np
import torch

import distman
from distman import DistributedManager, split_sizes
from distman.collectives import (
    all_gather_objects,
    all_gather_v,
    all_to_all_v,
    broadcast_data,
    distributed_transpose,
    fused_all_reduce,
    gather_objects,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.collectives._objects import _LARGE_BYTES
from distman.collectives._transport import _segments
from distman.fft import fft, fft2, irfft2, rfft, rfft2
from distman.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)

from .reference import check_against_one_process, different_on_each, random_tensor, strided

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DIFFERENTIABLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
BYTES = (0, 1, 40, 1_000, 4_096, _LARGE_BYTES, _segments.THRESHOLD, 3 * _segments.THRESHOLD, 2**21)
KEPT = 8  # results that are looked at again after so many more cases


def transposed(tensor):
    return tensor.mT.contiguous().mT


def part_of_more(tensor):
    return torch.cat([tensor, tensor])[: len(tensor)]


def negated(tensor):
    return torch._neg_view(-tensor) if tensor.dtype in DIFFERENTIABLE else tensor


def conjugated(tensor):
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor


FORMS = (torch.clone, strided, transposed, part_of_more, negated, conjugated)


class Draw(random.Random):
    """What all ranks draw alike."""

    def __init__(self, number, num_ranks):
        super().__init__(number)
        self.number = number
        self.num_ranks = num_ranks
        self.ranks = range(num_ranks)
        self.dim = self.randrange(2)
        self.root = self.randrange(num_ranks)
        self.form = self.choice(FORMS)
        self.dtype = self.choice((torch.bool, *INTEGERS, *FLOATS, *DIFFERENTIABLE))

    def summed_dtype(self):
        """One that can be added up, exactly or nearly so; kept from then on."""
        if self.dtype == torch.bool:
            self.dtype = torch.float64
        return self.dtype

    def length(self):
        """Of about so many bytes as some threshold has, in two columns."""
        return max(self.choice(BYTES) // self.dtype.itemsize // 2 + self.randint(-1, 1), 0)

    def lengths(self):
        return [self.length() if self.random() < 0.6 else self.randint(0, 3) for _ in self.ranks]

    def cut(self, length):
        """Random sizes of all ranks, whose sum is the length."""
        ends = sorted(self.randint(0, length) for _ in self.ranks[1:])
        return [end - start for start, end in zip([0, *ends], [*ends, length], strict=True)]

    def tensor(self, length, rank=0):
        shape = (length, 2) if self.dim == 0 else (2, length)
        return self.form(random_tensor(*shape, dtype=self.dtype, seed=100 * self.number + rank))

    def tensors(self, lengths):
        return [self.tensor(length, rank) for rank, length in enumerate(lengths)]


def gather_to_all(draw):
    lengths = draw.lengths()
    sizes = draw.choice((lengths, None))
    return (
        lambda tensor: all_gather_v(tensor, sizes, draw.dim),
        lambda tensors: [torch.cat(tensors, draw.dim)] * len(tensors),
        draw.tensors(lengths),
    )


def gather(draw):
    lengths = draw.lengths()
    sizes = draw.choice((lengths, None))

    def reference(tensors):
        whole = torch.cat(tensors, draw.dim)
        return [whole if rank == draw.root else whole.narrow(draw.dim, 0, 0) for rank in draw.ranks]

    return lambda tensor: gather_v(tensor, sizes, draw.dim, draw.root), reference, draw.tensors(lengths)


def scatter(draw):
    sizes = draw.cut(draw.length())
    return (
        lambda tensor: scatter_v(tensor, sizes, draw.dim, draw.root),
        lambda tensors: list(tensors[draw.root].split(sizes, draw.dim)),
        draw.tensors([sum(sizes)] * draw.num_ranks),
    )


def reduce_and_scatter(draw):
    draw.summed_dtype()
    sizes = draw.cut(draw.length())
    return (
        lambda tensor: reduce_scatter_v(tensor, sizes, draw.dim),
        lambda tensors: list(sum(tensors).split(sizes, draw.dim)),
        draw.tensors([sum(sizes)] * draw.num_ranks),
    )


def exchange(draw):
    sizes = [draw.cut(draw.length()) for _ in draw.ranks]

    def reference(tensors):
        parts = [tensor.split(row, draw.dim) for tensor, row in zip(tensors, sizes, strict=True)]
        return [torch.cat([of_one[rank] for of_one in parts], draw.dim) for rank in draw.ranks]

    return lambda tensor: all_to_all_v(tensor, sizes, draw.dim), reference, draw.tensors(map(sum, sizes))


def exchange_by_index(draw):
    draw.summed_dtype()  # the gradients of what is sent twice are added up
    lengths = [max(length, 1) for length in draw.lengths()]
    counts = [[draw.choice((0, 1, 3, length // 2)) for _ in draw.ranks] for length in lengths]
    indices = [
        [torch.tensor(draw.choices(range(length), k=count), dtype=torch.long) for count in row]
        for length, row in zip(lengths, counts, strict=True)
    ]

    def reference(tensors):
        return [
            torch.cat(
                [one.index_select(draw.dim, of_one[to]) for one, of_one in zip(tensors, indices, strict=True)], draw.dim
            )
            for to in draw.ranks
        ]

    return (
        lambda tensor: indexed_all_to_all_v(tensor, indices[DistributedManager().rank], counts, dim=draw.dim),
        reference,
        draw.tensors(lengths),
    )


def transpose(draw):
    rows, columns = draw.randint(0, 300), draw.randint(0, 300)
    sizes = draw.cut(columns)
    return (
        lambda tensor: distributed_transpose(tensor, 0, 1, sizes=sizes),
        lambda tensors: list(torch.cat(tensors, 1).split(split_sizes(rows, draw.num_ranks), 0)),
        [
            draw.form(random_tensor(rows, size, dtype=draw.dtype, seed=100 * draw.number + rank))
            for rank, size in enumerate(sizes)
        ],
    )


def reduce_fused(draw):
    draw.summed_dtype()
    return (
        lambda tensor: fused_all_reduce({"a": [torch.ones(3, dtype=draw.dtype), tensor], "b": tensor[:1]})["a"][1],
        lambda tensors: [sum(tensors)] * len(tensors),
        draw.tensors([draw.length()] * draw.num_ranks),
    )


def transform(draw):
    rows, columns = draw.randint(1, 400), draw.randint(2, 60)  # half of a spectrum of one column is that of no signal
    sizes = draw.cut(rows)
    own, whole = draw.choice(
        [
            (fft, torch.fft.fft),
            (rfft, torch.fft.rfft),
            (fft2, torch.fft.fft2),
            (rfft2, torch.fft.rfft2),
            (irfft2, torch.fft.irfft2),
        ]
    )
    draw.dtype = torch.complex128 if own in (fft, fft2, irfft2) else torch.float64
    options = {"dim": 0} if own in (fft, rfft) else {}
    along = 0 if options else 1  # the dim along which the result is sharded

    def reference(tensors):
        result = whole(torch.cat(tensors, 0), **options)
        return list(result.split(split_sizes(result.shape[along], draw.num_ranks), along))

    return (
        lambda tensor: own(tensor, sizes=sizes, shard_dim=0, **options),
        reference,
        [
            draw.form(random_tensor(size, columns, dtype=draw.dtype, seed=100 * draw.number + rank))
            for rank, size in enumerate(sizes)
        ],
    )


EXCHANGES = (
    *(gather_to_all, gather, scatter, reduce_and_scatter, exchange, exchange_by_index, transpose, reduce_fused),
    transform,
)


def check_exchange(draw, rank):
    """Compare a result and its gradient with one process; return the result, and what it must stay."""
    operation, reference, tensors = draw.choice(EXCHANGES)(draw)
    if draw.dtype in DIFFERENTIABLE and draw.random() < 0.6:
        check_against_one_process(operation, reference, tensors, rank, different_on_each)
    result, expected = operation(tensors[rank]), reference(tensors)[rank]
    torch.testing.assert_close(result, expected)
    return result, result.clone()


def check_region(draw, rank):
    """Compare the same of a parallel region, whose gradient is that of a process of which all ranks are copies."""
    draw.dtype = draw.choice(DIFFERENTIABLE)
    kind = draw.choice(("copy", "reduce", "scatter", "gather"))
    lengths = draw.lengths() if kind == "gather" else [draw.length()] * draw.num_ranks
    tensors = draw.tensors(lengths)
    given = tensors[rank] if kind in ("gather", "reduce") else tensors[0]
    sizes = split_sizes(lengths[0], draw.num_ranks)
    call, expected = {
        "copy": (copy_to_parallel_region, lambda: tensors[0]),
        "reduce": (reduce_from_parallel_region, lambda: sum(tensors)),
        "scatter": (
            lambda one: scatter_to_parallel_region(one, draw.dim),
            lambda: tensors[0].split(sizes, draw.dim)[rank],
        ),
        "gather": (
            lambda one: gather_from_parallel_region(one, draw.dim, draw.choice((lengths, None))),
            lambda: torch.cat(tensors, draw.dim),
        ),
    }[kind]
    leaf = given.clone().requires_grad_()
    result = call(leaf)
    torch.testing.assert_close(result.detach(), expected())
    shapes = (
        [part.shape for part in tensors[0].split(sizes, draw.dim)]
        if kind == "scatter"
        else [result.shape] * draw.num_ranks
    )
    weights = [
        random_tensor(*shape, dtype=draw.dtype, seed=one * (kind in ("copy", "scatter")))
        for one, shape in enumerate(shapes)
    ]
    result.backward(weights[rank])
    gradient = {
        "copy": lambda: sum(weights),
        "reduce": lambda: weights[0],
        "scatter": lambda: torch.cat(weights, draw.dim),
        "gather": lambda: weights[0].split(lengths, draw.dim)[rank],
    }[kind]
    torch.testing.assert_close(leaf.grad, gradient())
    return result.detach(), result.detach().clone()


def check_objects(draw, rank):
    """Compare objects that hold tensors and arrays; return a tensor of them and what it must stay."""
    tensors = draw.tensors(draw.lengths())
    objects = [
        {"rank": one, "of": [tensor, ("a word", None)], "array": np.arange(one)} for one, tensor in enumerate(tensors)
    ]
    kind = draw.choice(("all", "root", "from root"))
    if kind == "all":
        found, expected = all_gather_objects(objects[rank]), objects
    elif kind == "root":
        found = gather_objects(objects[rank], dst=draw.root)
        expected = objects if rank == draw.root else None
    else:
        found, expected = (
            [broadcast_data(objects[rank] if rank == draw.root else None, src=draw.root)],
            [objects[draw.root]],
        )
    if expected is None:
        assert found is None
        return torch.empty(0), torch.empty(0)
    for one, other in zip(found, expected, strict=True):
        assert (one["rank"], one["of"][1]) == (other["rank"], ("a word", None))
        torch.testing.assert_close(one["of"][0], other["of"][0])
        np.testing.assert_array_equal(one["array"], other["array"])
    return found[-1]["of"][0], expected[-1]["of"][0].clone()


def check(numbers):
    """Try cases on the ranks of a job; raise at the first one that is wrong."""
    manager = DistributedManager()
    kept = deque()
    for number in numbers:
        draw = Draw(number, manager.world_size)
        kind = draw.choices((check_exchange, check_region, check_objects), (6, 2, 1))[0]
        try:
            kept.append(kind(draw, manager.rank))
            if len(kept) > KEPT:
                torch.testing.assert_close(*kept.popleft(), rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"case {number} on {manager.world_size} ranks: {error}") from error


def check_in_job(numbers):
    DistributedManager.initialize()
    check(numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    numbers = [10**6 * options.seed + index for index in range(options.cases)]
    ways = [(num_ranks, memory) for num_ranks in (1, 2, 3, 4) for memory in "10"]
    for index, (num_ranks, memory) in enumerate(ways):
        os.environ[_segments.VARIABLE] = memory
        distman.run(check_in_job, numbers[index :: len(ways)], n=num_ranks)
        way = "sockets and memory of the host" if memory == "1" else "gloo"
        sys.stdout.write(f"{len(numbers[index :: len(ways)])} cases on {num_ranks} ranks over {way}: right\n")


if __name__ == "__main__":
    main()
