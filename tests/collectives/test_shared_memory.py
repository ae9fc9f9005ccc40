"""Pieces go through memory or over sockets, and arrive alike; what stands in the way is found out."""

import contextlib
import gc
import random
import resource
import sys
import threading
from pathlib import Path

import pytest
import torch

from distman import DistributedManager, fft, split_sizes
from distman.collectives import (
    _exchange,
    _objects,
    _shared_memory,
    all_gather_v,
    all_to_all_v,
    broadcast_data,
    distributed_transpose,
    fused_all_reduce,
    gather_objects,
    gather_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.collectives._shared_memory import THRESHOLD, VARIABLE, pool_of
from distman.collectives._validation import resolve_group
from distman.errors import JobFailed
from distman.testing import kill_rank, ranks
from tests.collectives.reference import random_tensor, strided
from tests.launch.processes import launch

pytestmark = pytest.mark.gloo_only("nothing goes through memory there")

SCRIPT = Path(__file__).parent / "scripts" / "fails_within.py"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
DTYPES_WITHOUT_GRADIENT = [torch.bool, torch.uint8, torch.int16, torch.int64]
MESSAGES_ALONE = 1 << 60
LARGE = THRESHOLD // 4  # float32 numbers of the smallest piece that goes through memory


def is_used():
    return bool(pool_of(resolve_group(None))._segments)


def logged(monkeypatch, level):
    """Return a list that will hold what is logged at a level."""
    lines = []
    monkeypatch.setattr(_shared_memory.logger, level, lambda text, *args: lines.append(text % args))
    return lines


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def num_segments():
    """Count the segments that this process could still hand out."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            found += _shared_memory._NAME in str(path.readlink())
    return found


def operations(world_size, sizes):
    """From a tensor of 8 rows and as many columns as ``sizes`` says, to the result."""
    return {
        "all_gather_v": lambda tensor: all_gather_v(tensor, sizes, 1),
        "gather_v": lambda tensor: gather_v(tensor, sizes, 1),
        "scatter_v": lambda tensor: scatter_v(tensor, split_sizes(8, world_size), 0),
        "reduce_scatter_v": lambda tensor: reduce_scatter_v(tensor[:, :1], split_sizes(8, world_size), 0),
        "all_to_all_v": lambda tensor: all_to_all_v(
            tensor[:, :1], [split_sizes(8, world_size) for _ in range(world_size)], 0
        ),
        "distributed_transpose": lambda tensor: distributed_transpose(tensor, 0, 1),
    }


def forward_and_backward(operation, tensor):
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return [operation(tensor)]
    leaf = tensor.detach().requires_grad_()
    result = operation(leaf)
    weights = random_tensor(*result.shape, dtype=result.dtype, seed=7)
    (grad,) = torch.autograd.grad(result, leaf, weights)
    return [result.detach(), grad]


@pytest.mark.parametrize("seed", range(3))
@ranks(2, 3, 4)
def test_both_ways_give_the_same_bits(monkeypatch, rank, world_size, seed):
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    sizes = [draw.randrange(1, 9) * draw.randrange(1, 30) for _ in range(world_size)]
    for name, operation in operations(world_size, sizes).items():
        dtype = draw.choice(DTYPES if name == "reduce_scatter_v" else DTYPES + DTYPES_WITHOUT_GRADIENT)
        tensor = strided(random_tensor(8, sizes[rank], dtype=dtype, seed=rank))
        if dtype.is_complex:
            tensor = tensor.conj()
        monkeypatch.setattr(_shared_memory, "THRESHOLD", MESSAGES_ALONE)
        expected = forward_and_backward(operation, tensor)
        monkeypatch.setattr(_shared_memory, "THRESHOLD", 16)
        for one, other in zip(expected, forward_and_backward(operation, tensor), strict=True):
            assert torch.equal(one, other), name
    assert is_used()


@pytest.mark.parametrize("name", ["fft2", "rfft2", "ifft2"])
@ranks(2, 3, 4)
def test_transforms_give_the_same_bits(monkeypatch, rank, world_size, name):
    dtype = torch.float32 if name == "rfft2" else torch.complex64
    tensor = random_tensor(split_sizes(37, world_size)[rank], 22, dtype=dtype, seed=rank)
    for out_dim in (0, 1):
        found = []
        for threshold in (MESSAGES_ALONE, 16):
            monkeypatch.setattr(_shared_memory, "THRESHOLD", threshold)
            found.append(
                forward_and_backward(lambda one, out=out_dim: getattr(fft, name)(one, shard_dim=0, out_dim=out), tensor)
            )
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    assert is_used()


@ranks(2, 3)
def test_small_pieces_are_messages_as_ever():
    all_gather_v(torch.ones(LARGE - 1))
    assert not is_used()
    all_gather_v(torch.ones(LARGE))
    assert is_used()


@ranks(2, 3)
def test_a_rank_that_does_without_says_so_once(monkeypatch, rank, world_size):
    unwilling = world_size - 1
    monkeypatch.setenv(VARIABLE, "0" if rank == unwilling else "1")
    headers = []
    send_header = _shared_memory.SharedPieces._send_header
    monkeypatch.setattr(
        _shared_memory.SharedPieces, "_send_header", lambda *args: (headers.append(args[1]), send_header(*args))
    )
    for number in range(4):
        full = all_gather_v(torch.full([LARGE], float(rank + number)))
        assert full[::LARGE].tolist() == [float(one + number) for one in range(world_size)]
    others = [one for one in range(unwilling) if one != rank]
    # To the unwilling one the first has a question, and the second the answer to its refusal.
    assert sorted(headers) == (others if rank == unwilling else sorted(others * 4 + [unwilling] * 2))
    assert pool_of(resolve_group(None)).refused == (set() if rank == unwilling else {unwilling})


@pytest.mark.parametrize("blind", [{0}, {1}, {0, 1}, {0, 1, 2}])
@ranks(2, 3)
def test_ranks_that_cannot_map(monkeypatch, rank, world_size, blind):
    lines = logged(monkeypatch, "info")
    if rank in blind:
        monkeypatch.setattr(_shared_memory, "_open", lambda _: None)
    for number in range(3):
        full = all_gather_v(torch.full([LARGE], float(rank + number)))
        assert full[::LARGE].tolist() == [float(one + number) for one in range(world_size)]
    others = blind.intersection(range(world_size)) - {rank}
    assert pool_of(resolve_group(None)).refused == others
    assert ["cannot map" in one for one in lines] == [True] * bool(others)


@pytest.mark.parametrize("seed", range(10))
@ranks(2, 3, 4)
def test_whatever_stands_in_the_way_on_each_rank(monkeypatch, rank, world_size, seed):
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    pool = pool_of(resolve_group(None))
    open_memory = _shared_memory._open
    for number in range(6):
        # The same on all ranks, of whom each takes its own.
        unwilling, blind, poor = ([draw.random() < 0.3 for _ in range(world_size)] for _ in range(3))
        sizes = [LARGE * draw.randrange(3) + draw.randrange(LARGE) for _ in range(world_size)]
        monkeypatch.setenv(VARIABLE, "0" if unwilling[rank] else "1")
        monkeypatch.setattr(_shared_memory, "_open", (lambda _: None) if blind[rank] else open_memory)
        pool.can_grow = not poor[rank]
        full = all_gather_v(torch.full([sizes[rank]], float(rank + number)), sizes)
        for one, part in enumerate(full.split(sizes)):
            assert part.eq(one + number).all()


@pytest.mark.parametrize("seed", range(5))
@ranks(2, 3, 4)
def test_transforms_whatever_stands_in_the_way_on_each_rank(monkeypatch, rank, world_size, seed):
    """Their blocks are computed into the memory before anybody knows whether the others can read it."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    shard = random_tensor(split_sizes(37, world_size)[rank], 22, dtype=torch.complex64, seed=rank)
    monkeypatch.setattr(_shared_memory, "THRESHOLD", MESSAGES_ALONE)
    expected = fft.fft2(shard, shard_dim=0)
    monkeypatch.setattr(_shared_memory, "THRESHOLD", 16)
    pool = pool_of(resolve_group(None))
    open_memory = _shared_memory._open
    for _ in range(6):
        unwilling, blind, poor = ([draw.random() < 0.3 for _ in range(world_size)] for _ in range(3))
        monkeypatch.setenv(VARIABLE, "0" if unwilling[rank] else "1")
        monkeypatch.setattr(_shared_memory, "_open", (lambda _: None) if blind[rank] else open_memory)
        pool.can_grow = not poor[rank]
        assert torch.equal(fft.fft2(shard, shard_dim=0), expected)


@ranks(2)
def test_what_a_rank_refuses_is_not_sent_from_memory_that_others_may_take(monkeypatch):
    monkeypatch.setattr(_shared_memory, "_open", lambda _: None)
    pieces = []
    send_piece = _shared_memory.SharedPieces._send_piece
    monkeypatch.setattr(
        _shared_memory.SharedPieces, "_send_piece", lambda *args: (pieces.append(args[2]), send_piece(*args))
    )
    fft.fft2(torch.ones(1024, 1024, dtype=torch.complex64), shard_dim=0)
    (segment,) = pool_of(resolve_group(None))._segments.values()
    begin = segment.memory.data_ptr()
    assert [begin <= piece.data_ptr() < begin + segment.memory.nbytes for piece in pieces] == [False]


@ranks(2)
def test_room_for_pieces_that_could_not_be_made_is_there_again(monkeypatch, rank):
    group = resolve_group(None)
    like = torch.ones(1)
    monkeypatch.setattr(_exchange, "new_empty", lambda *_: torch.empty(2**60))
    with pytest.raises(RuntimeError):
        _exchange.SendBuffers(like, {1 - rank: (LARGE,), rank: (1,)}, group)
    monkeypatch.undo()
    with _exchange.SendBuffers(like, {1 - rank: (LARGE,)}, group):
        pass  # nor may an error before the exchange keep it
    assert [segment.is_free for segment in pool_of(group)._segments.values()] == [True]


@ranks(2)
def test_too_little_memory(monkeypatch, rank):
    lines = logged(monkeypatch, "warning")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        for _ in range(3):
            assert all_gather_v(torch.full([LARGE], float(rank)))[::LARGE].tolist() == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ["no shared memory" in one for one in lines] == [True] * (rank == 0)


@ranks(2)
def test_more_than_the_pool_holds(monkeypatch, rank):
    monkeypatch.setattr(_shared_memory, "_MOST_BYTES", 2**22)
    for size in (2**18, 2**20, 2**21, 2**18):  # the third goes over the socket
        assert all_gather_v(torch.full([size], float(rank)))[::size].tolist() == [0, 1]


@ranks(2, 3)
def test_many_exchanges_need_no_more_memory_nor_descriptors(rank, world_size):
    draw = random.Random(1)  # noqa: S311 - not for secrets
    pool = pool_of(resolve_group(None))
    counts = []
    for number in range(100):
        sizes = [LARGE * draw.randrange(1, 6) for _ in range(world_size)]
        full = all_gather_v(torch.full([sizes[rank]], float(number)), sizes)
        assert full.min() == full.max() == number
        counts.append(num_descriptors())
    assert pool._num_bytes <= _shared_memory._MOST_BYTES
    assert len(pool._segments) <= _shared_memory._MOST_SEGMENTS
    assert max(counts) <= counts[0] + _shared_memory._MOST_SEGMENTS


PLACES = ["_write", "_send_header", "_receive"]
"""Before a piece is in the memory, when it is and nobody knows, and when all know."""


@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_the_middle_ends_the_wait_of_the_others_with_its_cause(place):
    done = launch([sys.executable, "-m", "distman", "run", "-n", "3", SCRIPT, place], timeout=60)
    assert done.returncode == 1
    heard = [line for line in done.lines if "rank 1 raised" in line]
    assert sorted(heard) == [f"{rank}: rank {rank}: rank 1 raised ValueError: in the middle" for rank in (0, 2)]
    assert done.stderr.count("ValueError: in the middle") == 1


@pytest.mark.parametrize("place", PLACES)
@ranks(3, dies=[1], manager=False)
def test_a_death_in_the_middle_ends_the_wait_of_the_others(monkeypatch, place):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize()
    all_gather_v(torch.ones(LARGE))
    monkeypatch.setattr(_shared_memory.SharedPieces, place, dies_on_rank_1(getattr(_shared_memory.SharedPieces, place)))
    with pytest.raises(JobFailed, match="rank 1"):
        all_gather_v(torch.ones(2 * LARGE))


def dies_on_rank_1(function):
    def call(*args, **kwargs):
        kill_rank(1)
        return function(*args, **kwargs)

    return call


@ranks(2)
def test_two_threads_on_two_groups(rank):
    manager = DistributedManager()
    manager.initialize_mesh([2, 1], ["one", "alone"])
    failed = []

    def work(group):
        try:
            for number in range(30):
                full = all_gather_v(torch.full([LARGE], float(rank + number)), group=group)
                assert full[::LARGE].tolist() == [number, number + 1]
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(group,)) for group in ("one", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@ranks(2)
def test_inference_mode_and_back(rank):
    with torch.inference_mode():
        all_gather_v(torch.ones(LARGE))
    assert all_gather_v(torch.full([LARGE], float(rank)))[::LARGE].tolist() == [0, 1]


@ranks(2, 3)
def test_large_objects(rank, world_size):
    found = gather_objects(bytes([rank]) * 2 * THRESHOLD)
    if rank == 0:
        assert found == [bytes([one]) * 2 * THRESHOLD for one in range(world_size)]
    assert is_used() == (rank != 0)


@pytest.mark.parametrize("seed", range(3))
@ranks(2, 3)
def test_tensors_are_broadcast_in_parts(monkeypatch, rank, world_size, seed):
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    monkeypatch.setattr(_objects, "THRESHOLD", 2**16)
    monkeypatch.setattr(_shared_memory, "THRESHOLD", 2**14)
    monkeypatch.setattr(_exchange, "_PART_BYTES", 2**16)
    sizes = [2**16 - 1, 2**16, 2**17, 2**20 + 1, draw.randrange(2**16, 2**19)]
    src = draw.randrange(world_size)
    data = [
        torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8) for size in sizes
    ]
    found = broadcast_data(data if rank == src else None, src)
    assert [one.equal(other) for one, other in zip(found, data, strict=True)] == [True] * len(sizes)
    assert is_used() == (rank == src)
    assert len(pool_of(resolve_group(None))._segments) <= 2  # one is read while the other is written


@pytest.mark.parametrize("unwilling", [0, 1])
@ranks(2, 3)
def test_without_memory_a_broadcast_is_one_of_the_backend(monkeypatch, rank, unwilling):
    monkeypatch.setenv(VARIABLE, "0" if rank == unwilling else "1")
    parts = []
    broadcast_parts = _exchange.broadcast_parts
    monkeypatch.setattr(_objects, "broadcast_parts", lambda *args: (parts.append(1), broadcast_parts(*args)))
    for number in range(3):
        found = broadcast_data(torch.full([LARGE], float(number)) if rank == 0 else None)
        assert found.min() == found.max() == number
    assert len(parts) == unwilling  # until rank 0 knows


@pytest.mark.parametrize("lengths", [[8 * LARGE], [3 * LARGE + 5, 6 * LARGE], [LARGE] * 9], ids=len)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@ranks(2, 3)
def test_large_sums_go_through_memory(rank, world_size, op, lengths):
    terms = [[random_tensor(length, dtype=torch.float32, seed=one) for length in lengths] for one in range(world_size)]
    mine = [term.clone().requires_grad_(op != "max") for term in terms[rank]]
    found = fused_all_reduce(mine, op=op)
    for result, *stacked in zip(found, *terms, strict=True):
        reduced = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax}[op](torch.stack(stacked), 0)
        torch.testing.assert_close(result, reduced)
    assert is_used() == (op != "max")
    if op != "max":
        grads = torch.autograd.grad([result.sum() * (rank + 1) for result in found], mine)
        total = sum(range(1, world_size + 1)) / (world_size if op == "avg" else 1)
        for grad in grads:
            torch.testing.assert_close(grad, torch.full_like(grad, total))
    for result, term, before in zip(found, mine, terms[rank], strict=True):
        result.detach().zero_()  # it is new
        assert term.equal(before)


@ranks(1, 2, 3)
def test_a_large_sum_of_one_tensor_may_be_changed_in_place(rank, world_size):
    mine = torch.full([8 * LARGE], float(rank + 1), requires_grad=True)
    total = fused_all_reduce(mine)
    total += 1
    total.sum().backward()
    assert total.unique().item() == sum(range(1, world_size + 1)) + 1
    assert mine.grad.unique().item() == world_size
    assert mine.unique().item() == rank + 1
    without_gradient = fused_all_reduce(mine.detach(), op="max")
    without_gradient += 1
    assert mine.unique().item() == rank + 1


@ranks(2, 3)
def test_sums_of_which_one_rank_cannot_go_through_memory(monkeypatch, rank, world_size):
    """The ranks find out in the message that they compare in."""
    total = sum(range(1, world_size + 1))
    mine = torch.full([8 * LARGE], float(rank + 1))
    if rank == 1:
        result, work = fused_all_reduce(mine, async_op=True)
        work.wait()
    else:
        result = fused_all_reduce(mine)
    assert result.unique().item() == total
    monkeypatch.setenv(VARIABLE, "0" if rank == 1 else "1")
    assert fused_all_reduce(mine).unique().item() == total
    assert not is_used()


@ranks(2)
def test_a_new_job_begins_anew():
    gc.collect()
    before = num_segments()  # an error that another test has kept may hold some
    all_gather_v(torch.ones(LARGE))
    assert num_segments() == before + 1
    DistributedManager.cleanup()
    assert num_segments() == before
    DistributedManager.initialize()
    assert not is_used()
    all_gather_v(torch.ones(LARGE))
    assert is_used()
