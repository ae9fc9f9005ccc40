"""Exchanges of ranks of one host over sockets and memory: what goes which way, and what ends them."""

import contextlib
import gc
import os
import random
import resource
import signal
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, fft, split_sizes
from distman._torch_internals import gloo_timeout
from distman.collectives import (
    _exchange,
    _objects,
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
from distman.collectives._exchange import all_gather_numbers, exchange, send_buffers
from distman.collectives._transport import HostTransport, _meeting, _segments, transport_of
from distman.collectives._transport._connections import Connections
from distman.collectives._transport._host import HostBatch
from distman.collectives._transport._segments import THRESHOLD, VARIABLE
from distman.collectives._validation import resolve_group
from distman.decorators import on_rank
from distman.errors import DistmanError, JobFailed, PlanMismatchError
from distman.metrics import reduce_loss
from distman.testing import kill_rank, ranks
from tests.collectives.reference import random_tensor, strided
from tests.launch.preloaded import PYTHON
from tests.launch.processes import launch

pytestmark = pytest.mark.gloo_only("nothing goes over sockets or memory there")

SCRIPT = Path(__file__).parent.parent / "scripts" / "fails_within.py"
CPU = torch.device("cpu")
LIMIT = 60.0
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
DTYPES_WITHOUT_GRADIENT = [torch.bool, torch.uint8, torch.int16, torch.int64]
LARGE = THRESHOLD // 4  # float32 numbers of the smallest piece that goes through memory
MANY = 400  # messages of one sum each, of 4 kB: more than have room


def connections_of(name=None):
    return transport_of(resolve_group(name), CPU)._connections


def segments_of(name=None):
    return transport_of(resolve_group(name), CPU).segments


def is_used():
    return bool(segments_of().made)


def num_segments():
    """Count the segments that this process could still hand out."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            found += _segments._NAME in str(path.readlink())
    return found


# --- which way -------------------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
def test_members_connect_once(world_size):
    assert connections_of() is None
    found = set()
    for _ in range(2):
        assert all_gather_v(torch.ones(1)).tolist() == [1] * world_size
        assert len(connections_of().links) == world_size - 1
        found.add(connections_of())
    assert len(found) == 1


def cannot(address):
    raise OSError(f"not at {address!r}")


@pytest.mark.parametrize("side", [None, "_listener", "_dial_at"])
@ranks(2, 3)
def test_ranks_connect_if_they_can(monkeypatch, world_size, rank, side):
    if side is not None:
        monkeypatch.setattr(_meeting, side, lambda address, *_: cannot(address))
    for number in range(3):
        assert all_gather_v(torch.full([1], float(rank))).tolist() == [float(one) for one in range(world_size)]
        assert fused_all_reduce(torch.tensor(number)) == number * world_size
        assert all_gather_v(torch.full([LARGE], float(rank)))[::LARGE].tolist() == list(range(world_size))
    assert len(connections_of().links) == (0 if side else world_size - 1)


PAIRS = {frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))}
WITHOUT = {  # which ranks do without, and which pairs are not connected
    "ranks 0 and 2 cannot reach each other": ((), {frozenset((0, 2))}),
    "rank 1 is told to": ((1,), {frozenset((0, 1)), frozenset((1, 2))}),
    "all are told to": ((0, 1, 2), PAIRS),
}


@pytest.mark.parametrize("case", WITHOUT)
@ranks(3)
def test_any_pair_may_do_without(monkeypatch, rank, case):
    told, apart = WITHOUT[case]
    monkeypatch.setenv(VARIABLE, "0" if rank in told else "1")
    if not told:
        caller = _meeting.Meeting._caller
        monkeypatch.setattr(
            _meeting.Meeting,
            "_caller",
            lambda me, *args: -1 if {rank, (found := caller(me, *args))} in apart else found,
        )
    for number in range(3):
        sizes = [1 + number, 2, LARGE]
        gathered = all_gather_v(torch.full((sizes[rank],), float(rank)), sizes)
        assert [part.unique().tolist() for part in gathered.split(sizes)] == [[0.0], [1.0], [2.0]]
        assert fused_all_reduce([torch.tensor(rank), torch.tensor(2)]) == [3, 6]
        assert all_gather_numbers([rank], resolve_group(None)) == [[0], [1], [2]]
    assert set(connections_of().links) == {other for pair in PAIRS - apart if rank in pair for other in pair - {rank}}


@ranks(2)
def test_half_of_the_files_are_left_to_the_program(rank):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        os.close(lowest := os.dup(0))  # those to the store have the highest numbers
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * lowest - 4, limits[1]))
    try:
        assert all_gather_v(torch.full([LARGE], float(rank)))[::LARGE].tolist() == [0, 1]
        assert len(connections_of().links) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@ranks(2)
def test_a_group_that_is_written_in_python_has_its_own_messages(rank, world_size):
    assert gloo_timeout(type("Own", (dist.ProcessGroup,), {})(rank, world_size)) is None
    assert isinstance(transport_of(resolve_group(None), CPU), HostTransport)


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
@ranks(2, 3)
def test_both_ways_give_the_same_bits(monkeypatch, rank, world_size, seed):
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    sizes = [draw.randrange(1, 9) * draw.randrange(1, 30) for _ in range(world_size)]
    for name, operation in operations(world_size, sizes).items():
        dtype = draw.choice(DTYPES if name == "reduce_scatter_v" else DTYPES + DTYPES_WITHOUT_GRADIENT)
        tensor = strided(random_tensor(8, sizes[rank], dtype=dtype, seed=rank))
        if dtype.is_complex:
            tensor = tensor.conj()
        monkeypatch.setattr(_segments, "THRESHOLD", 2**60)
        expected = forward_and_backward(operation, tensor)
        monkeypatch.setattr(_segments, "THRESHOLD", 16)
        for one, other in zip(expected, forward_and_backward(operation, tensor), strict=True):
            assert torch.equal(one, other), name
    assert is_used()


@pytest.mark.parametrize("name", ["fft2", "rfft2"])
@ranks(2, 3)
def test_transforms_give_the_same_bits(monkeypatch, rank, world_size, name):
    dtype = torch.float32 if name == "rfft2" else torch.complex64
    tensor = random_tensor(split_sizes(37, world_size)[rank], 22, dtype=dtype, seed=rank)
    for out_dim in (0, 1):
        found = []
        for threshold in (2**60, 16):
            monkeypatch.setattr(_segments, "THRESHOLD", threshold)
            found.append(
                forward_and_backward(lambda one, out=out_dim: getattr(fft, name)(one, shard_dim=0, out_dim=out), tensor)
            )
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    assert is_used()


@ranks(2, 3)
def test_small_pieces_are_in_their_messages():
    all_gather_v(torch.ones(LARGE - 1))
    assert not is_used()
    all_gather_v(torch.ones(LARGE))
    assert is_used()


@pytest.mark.parametrize("wanted", ["0", "1"])
@ranks(2)
def test_pieces_of_one_element_of_any_stride(monkeypatch, rank, wanted):
    monkeypatch.setenv(VARIABLE, wanted)
    for dtype in DTYPES + DTYPES_WITHOUT_GRADIENT:
        sends = [torch.full((1, 2), rank, dtype=dtype)[:, 0] for _ in range(2)]
        receives = [torch.zeros((1, 2), dtype=dtype)[:, 0] for _ in range(2)]
        exchange(sends, receives, resolve_group(None), str(dtype))
        assert [bool(piece.item()) for piece in receives] == [False, True]


@pytest.mark.parametrize("seed", range(2))
@ranks(2, 3, 4)
def test_pieces_of_all_sizes_in_any_mixture(rank, world_size, seed):
    """Below and above what a socket takes at once and what goes through a segment, with and without memory."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    group = resolve_group(None)
    for _ in range(20):
        sizes = [
            [draw.choice([0, 1, 7, 2**10, 2**14, LARGE - 1, LARGE, LARGE + 1, 2**18]) for _ in range(world_size)]
            for _ in range(world_size)
        ]
        segments_of()._can_grow = [draw.random() < 0.5 for _ in range(world_size)][rank]
        sends = [torch.full((sizes[rank][to],), float(10 * rank + to)) for to in range(world_size)]
        receives = [torch.empty(sizes[origin][rank]) for origin in range(world_size)]
        exchange(sends, receives, group)
        for origin, piece in enumerate(receives):
            assert piece.unique().tolist() == ([float(10 * origin + rank)] if len(piece) else [])


@pytest.mark.parametrize("seed", range(3))
@ranks(2, 3)
def test_transforms_though_some_have_no_memory(monkeypatch, rank, world_size, seed):
    """Their blocks are computed into the memory, if there is some, before anybody is told."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    shard = random_tensor(split_sizes(37, world_size)[rank], 22, dtype=torch.complex64, seed=rank)
    monkeypatch.setattr(_segments, "THRESHOLD", 2**60)
    expected = fft.fft2(shard, shard_dim=0)
    monkeypatch.setattr(_segments, "THRESHOLD", 16)
    for _ in range(6):
        segments = segments_of()
        segments._can_grow = [draw.random() < 0.5 for _ in range(world_size)][rank]
        if not segments._can_grow:
            while not all(segment.is_free() for segment in segments.made.values()):
                connections_of().look(segments.readers())
            segments.made.clear()
        assert torch.equal(fft.fft2(shard, shard_dim=0), expected)


@ranks(2)
def test_room_for_pieces_that_could_not_be_made_is_there_again(monkeypatch, rank):
    group, like = resolve_group(None), torch.ones(1)
    monkeypatch.setattr("distman.collectives._exchange.new_empty", lambda *_: torch.empty(2**60))
    with pytest.raises(RuntimeError), send_buffers(like, {1 - rank: (LARGE,), rank: (1,)}, group):
        pass
    monkeypatch.undo()
    with send_buffers(like, {1 - rank: (LARGE,)}, group):
        pass  # nor may an error before the exchange keep it
    assert [segment.is_held for segment in segments_of().made.values()] == [False]


@ranks(2)
def test_too_little_memory(monkeypatch, rank):
    lines = []
    monkeypatch.setattr(_segments.logger, "warning", lambda text, *args: lines.append(text % args))
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
def test_more_than_a_segment_holds(monkeypatch, rank):
    monkeypatch.setattr(_segments, "_MOST_BYTES", 2**22)
    for size in (2**18, 2**20, 2**21, 2**18):  # the third is in its message
        assert all_gather_v(torch.full([size], float(rank)))[::size].tolist() == [0, 1]


@ranks(3)
def test_many_exchanges_need_no_more_memory_nor_descriptors_nor_threads(rank, world_size):
    draw = random.Random(1)  # noqa: S311 - not for secrets
    counts = []
    for number in range(40):
        sizes = [LARGE * draw.randrange(1, 40) for _ in range(world_size)]
        full = all_gather_v(torch.full([sizes[rank]], float(number)), sizes)
        assert full.min() == full.max() == number
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert max(counts) <= counts[0] + _segments._NUM_SEGMENTS * (1 + world_size)
    assert [thread for thread in threading.enumerate() if thread.name == "distman-transport"] == []


@ranks(2)
def test_a_result_is_gone_at_once_without_the_garbage_collector(rank):
    gc.disable()
    try:
        for size in (1, LARGE - 1, LARGE):
            full = all_gather_v(torch.full([size], float(rank)), [size, size])
            storage = weakref.ref(full.untyped_storage())
            del full
            assert storage() is None
    finally:
        gc.enable()


@ranks(2)
def test_groups_that_are_gone_leave_nothing(rank):
    manager = DistributedManager()

    def num_open():
        gc.collect()
        manager.barrier()  # the other side may have to close first
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    for number in range(3):
        manager.create_process_subgroup(f"pair {number}", 2)
        assert all_gather_v(torch.full([LARGE], float(rank)), group=f"pair {number}")[::LARGE].tolist() == [0, 1]
        manager.destroy_group(f"pair {number}")
        counts.append(num_open())
    assert counts[-1] <= counts[1]


# --- objects, broadcasts and sums ------------------------------------------------------------------------------------


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
    monkeypatch.setattr(_objects, "_LEAST_IN_PARTS", 2**16)
    monkeypatch.setattr(_segments, "THRESHOLD", 2**14)
    monkeypatch.setattr(_exchange, "_PART_BYTES", 2**16)
    sizes = [2**16 - 1, 2**16, 2**17, 2**20 + 1, draw.randrange(2**16, 2**19)]
    src = draw.randrange(world_size)
    data = [
        torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8) for size in sizes
    ]
    found = broadcast_data(data if rank == src else None, src)
    assert [one.equal(other) for one, other in zip(found, data, strict=True)] == [True] * len(sizes)
    assert is_used() == (rank == src)


@pytest.mark.parametrize("unwilling", [0, 1])
@ranks(2, 3)
def test_a_broadcast_though_a_rank_does_without(monkeypatch, rank, unwilling):
    monkeypatch.setenv(VARIABLE, "0" if rank == unwilling else "1")
    for number in range(3):
        found = broadcast_data(torch.full([4 * LARGE], float(number)) if rank == 0 else None)
        assert found.min() == found.max() == number


@pytest.mark.parametrize("lengths", [[64 * LARGE], [24 * LARGE + 5, 48 * LARGE], [8 * LARGE] * 9], ids=len)
@ranks(3)
def test_large_sums_go_through_memory(rank, world_size, lengths):
    terms = [[random_tensor(length, dtype=torch.float32, seed=one) for length in lengths] for one in range(world_size)]
    for op in ("max", "sum", "avg"):
        check_large_reduction(rank, world_size, op, terms)


def check_large_reduction(rank, world_size, op, terms):
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
def test_sums_of_which_one_rank_does_without(monkeypatch, rank, world_size):
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


@pytest.mark.parametrize("order", ["as begun", "reversed", "after a blocking one"])
@ranks(3)
def test_more_reductions_under_way_than_have_room_are_told_apart(rank, world_size, order):
    begun = [fused_all_reduce(torch.tensor([float(number + rank)]), async_op=True) for number in range(MANY)]
    if order == "after a blocking one":
        assert fused_all_reduce(torch.tensor(1.0)) == world_size
    for _, work in reversed(begun) if order == "reversed" else begun:
        work.wait()
    expected = [float(world_size * number + sum(range(world_size))) for number in range(MANY)]
    assert [total.item() for total, _ in begun] == expected


@pytest.mark.parametrize("first", [0, 1])
@ranks(2)
def test_full_buffers_block_nobody_while_one_side_waits_elsewhere(rank, first):
    """Both have sent more than has room; one waits for the other's messages, the other for it, by other means."""
    begun = [fused_all_reduce(torch.tensor(float(number)), async_op=True) for number in range(MANY)]
    for turn in (first, 1 - first):
        if rank == turn:
            for _, work in begun:
                work.wait()
        DistributedManager().barrier()
    assert [total.item() for total, _ in begun] == [2.0 * number for number in range(MANY)]


@ranks(2)
def test_a_source_that_runs_ahead_waits_for_its_readers_to_come(rank):
    for number in range(300):
        part = scatter_v(torch.full((2, 50), float(number)) if rank == 0 else torch.empty(2, 50), [1, 1], 0)
        assert part.unique().tolist() == [number]
    assert not any(one._queues or one.pending for one in connections_of().links.values())


# --- calls that fail -------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_backward_pass_where_not_all_ranks_run_is_refused_at_once():
    value = torch.ones(2, requires_grad=True)
    total = fused_all_reduce(value).sum()
    with pytest.raises(DistmanError, match="the backward pass of a collective must be called where all its ranks run"):
        on_rank(0)(total.backward)()


@ranks(2)
def test_a_first_exchange_in_inference_mode_with_another_default_device(rank):
    shard, term = torch.ones(LARGE + rank), torch.tensor(float(rank))
    with torch.inference_mode(), torch.device("meta"):
        full, total = all_gather_v(shard), fused_all_reduce({"of this test alone": term})
    assert full.unique().tolist() == [1.0]
    assert total["of this test alone"] == 1
    assert all_gather_v(shard).unique().tolist() == [1.0]


REFUSED = {
    "broadcast_data": lambda: broadcast_data([1]),
    "reduce_loss": lambda: reduce_loss(1.0),
    "fused_all_reduce": lambda: fused_all_reduce(torch.ones(1)),
    "scatter_v": lambda: scatter_v(torch.ones(2), [1, 1]),
}


@pytest.mark.parametrize("name", REFUSED)
@ranks(2)
def test_a_call_that_is_refused_leaves_the_group_as_it_was(name):
    for _ in range(2):
        with pytest.raises(DistmanError, match="must be called where all its ranks run"):
            on_rank(0)(REFUSED[name])()
        assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@ranks(2)
def test_unlike_sums_tell_the_ranks_apart_at_once(rank):
    _, work = fused_all_reduce(torch.ones(2 + rank), async_op=True)
    with pytest.raises(PlanMismatchError, match=r"the tensor \[3\] torch\.float32"):
        work.wait()


@ranks(2)
def test_a_blocking_reduction_on_one_rank_meets_one_under_way_on_the_other(rank):
    if rank == 0:
        total, work = fused_all_reduce(torch.tensor(1.0), async_op=True)
        work.wait()
    else:
        total = fused_all_reduce(torch.tensor(2.0))
    assert total == 3


MOMENTS = [
    (HostBatch, "_send"),
    (HostBatch, "_post"),
    (HostBatch, "take"),
    (Connections, "send"),
    (HostBatch, "finish"),
]
"""Before a piece is written, when it is and nobody knows, when all know, after that, and when a piece was read."""
NAMES = [name for _, name in MOMENTS]


@pytest.mark.parametrize("name", ["_send", "take"])
def test_an_error_in_the_middle_ends_the_wait_of_the_others_with_its_cause(name):
    done = launch([PYTHON, "-m", "distman", "run", "-n", "3", SCRIPT, name], timeout=60)
    assert done.returncode == 1
    heard = [line for line in done.lines if "rank 1 raised" in line]
    assert sorted(heard) == [f"{rank}: rank {rank}: rank 1 raised ValueError: in the middle" for rank in (0, 2)]
    assert done.stderr.count("ValueError: in the middle") == 1


@pytest.mark.parametrize("moment", MOMENTS[:3], ids=NAMES[:3])
@ranks(3, dies=[1], manager=False)
def test_a_death_in_the_middle_ends_the_wait_of_the_others(monkeypatch, rank, moment):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize()
    all_gather_v(torch.ones(LARGE))
    if rank == 1:
        monkeypatch.setattr(*moment, lambda *_: kill_rank(1))
    with pytest.raises(JobFailed, match="rank 1"):
        all_gather_v(torch.ones(2 * LARGE))


@ranks(3, dies=[1])
def test_a_death_is_seen_where_nobody_watches():
    all_gather_v(torch.ones(1))
    kill_rank(1)
    with pytest.raises(RuntimeError, match="Connection closed"):  # rank 0 may close the group before rank 2 looks
        all_gather_v(torch.ones(1))


@pytest.mark.parametrize("moment", MOMENTS, ids=NAMES)
@pytest.mark.parametrize("size", [3, LARGE])
@ranks(2, manager=False)
def test_a_rank_that_stops_in_the_middle_is_waited_for(monkeypatch, rank, moment, size):
    """It is stopped in any moment, as by Ctrl-Z, and goes on when the other has been seen to wait."""
    DistributedManager.initialize()
    all_gather_v(torch.ones(LARGE))
    if rank == 1:
        kind, name = moment
        real = getattr(kind, name)

        def stops(*args, **kwargs):
            child = os.fork()
            if child == 0:
                os.kill(os.getppid(), signal.SIGSTOP)
                while "T (stopped)" not in Path(f"/proc/{os.getppid()}/status").read_text():
                    os.sched_yield()
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.waitpid(child, 0)
            return real(*args, **kwargs)

        monkeypatch.setattr(kind, name, stops)
    for number in range(3):
        assert all_gather_v(torch.full([size], float(rank + number)))[::size].tolist() == [number, number + 1]


@ranks(2, manager=False)
def test_a_rank_that_left_its_group_ends_the_wait_of_the_others(rank):
    manager = DistributedManager.initialize()
    manager.create_process_subgroup("pair", 2)
    all_gather_v(torch.ones(1), group="pair")
    if rank == 1:
        dist.destroy_process_group(manager.group("pair"))
    manager.barrier("left")
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 of the group has left it"):
            all_gather_v(torch.ones(1), group="pair")
    manager.barrier("seen")
    assert all_gather_v(torch.ones(1)).tolist() == [1, 1]  # other groups go on


@ranks(2, manager=False)
def test_a_group_has_its_time_limit(rank):
    manager = DistributedManager.initialize(timeout=1)
    manager.create_process_subgroup("pair", 2)
    all_gather_v(torch.ones(1), group="pair")
    if rank == 0:
        with pytest.raises(RuntimeError, match="Connection timed out after 1 s: rank 1 of the group has not sent"):
            all_gather_v(torch.ones(1), group="pair")
    manager.barrier(timeout=LIMIT)


@pytest.mark.parametrize("step", ["_swap", "_dial", "_accept"])
@ranks(2)
def test_an_interruption_while_they_connect_closes_the_group(monkeypatch, rank, step):
    DistributedManager.create_process_subgroup("pair", 2)

    def interrupt(*_):
        raise KeyboardInterrupt

    is_cut = rank == (1 if step == "_dial" else 0)  # who dials is after who listens
    with monkeypatch.context() as patch:
        if is_cut:
            patch.setattr(_meeting.Meeting, step, interrupt)
        with pytest.raises(KeyboardInterrupt if is_cut else RuntimeError):
            all_gather_v(torch.ones(1), [1, 1], group="pair")
    with pytest.raises(RuntimeError):
        all_gather_v(torch.ones(1), [1, 1], group="pair")


# --- threads and jobs ------------------------------------------------------------------------------------------------


@ranks(2)
def test_threads_of_a_rank_exchange_in_one_group(rank):
    errors = []

    def run(size):
        for number in range(100):
            gathered = all_gather_v(torch.full((size,), float(number + rank)), [size, size])
            if [part.unique().tolist() for part in gathered.split([size, size])] != [[number], [number + 1]]:
                errors.append((size, number))

    threads = [threading.Thread(target=run, args=(size,)) for size in (1, 2, LARGE // 2, LARGE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


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


@ranks(2)
def test_a_new_job_begins_anew():
    gc.collect()
    before = num_segments()  # an error that another test has kept may hold some
    all_gather_v(torch.ones(LARGE))
    assert num_segments() > before
    DistributedManager.cleanup()
    assert num_segments() == before
    DistributedManager.initialize()
    assert not is_used()
    all_gather_v(torch.ones(LARGE))
    assert is_used()
