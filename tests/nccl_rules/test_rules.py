"""What the backend with NCCL's rules refuses, and what it lets pass."""

import threading

import pytest
import torch
import torch.distributed as dist

from distman._torch_internals import all_gather_single, reduce_scatter_single
from distman.testing import ranks

pytestmark = pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend")
CPU = torch.device("cpu")


def backend_of(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


def swap(mine, theirs, peer):
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])


@ranks(2, manager=False)
def test_tensors_that_are_refused_leave_the_group_as_it_was():
    whole = torch.zeros(4)
    refused = [
        (TypeError, "no data type for Short", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16))),
        (TypeError, "no data type for UInt32", lambda: dist.broadcast(torch.ones(2, dtype=torch.uint32), 0)),
        (ValueError, "contiguous", lambda: dist.all_reduce(torch.ones(2, 3).T)),
        (ValueError, "sum of bool", lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool))),
        (ValueError, "no reduction", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int), dist.ReduceOp.BXOR)),
        (ValueError, "as large as those of all ranks", lambda: all_gather_single(whole, torch.ones(1))),
        (ValueError, "as large as those of all ranks", lambda: reduce_scatter_single(torch.ones(1), whole)),
        (ValueError, "as much between all ranks", lambda: dist.all_gather([torch.ones(1), whole], torch.ones(1))),
        (ValueError, "divisible", lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3))),
        (RuntimeError, "does not support recvAnysource", lambda: dist.recv(torch.ones(1))),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [2, 2]


@ranks(2, manager=False)
def test_what_passes_gives_what_gloo_gives(rank):
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            tensor = torch.tensor([rank + 2, 3], dtype=dtype)
            dist.all_reduce(tensor, op)
            expected = {"SUM": [5, 6], "MAX": [3, 3], "MIN": [2, 3], "PRODUCT": [6, 9]}[op.name]
            assert tensor.tolist() == expected
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False]
    average = torch.tensor([rank + 1.0])
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.tolist() == [1.5]
    whole = torch.empty(4)
    all_gather_single(whole, torch.full((2,), float(rank)))
    assert whole.tolist() == [0, 0, 1, 1]
    part = torch.empty(2)
    reduce_scatter_single(part, torch.arange(4.0))
    assert part.tolist() == [[0, 2], [4, 6]][rank]
    received = torch.empty(3)
    dist.all_to_all_single(received, torch.arange(3.0) + 10 * rank, [[1, 2], [2, 1]][rank], [[1, 2], [2, 1]][rank])
    assert received.tolist() == [[0, 10, 11], [1, 2, 12]][rank]
    pieces = [torch.empty(1) for _ in range(2)] if rank == 1 else None
    dist.gather(torch.tensor([float(rank)]), pieces, dst=1)
    assert pieces is None or torch.cat(pieces).tolist() == [0, 1]
    piece = torch.empty(1)
    dist.scatter(piece, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
    assert piece.item() == 5 + rank
    total = torch.ones(1)
    dist.reduce(total, 1)
    assert total.item() == 1 + rank
    dist.barrier()


@ranks(2, manager=False)
def test_point_to_point_needs_a_batch_and_a_connected_group_and_has_no_tags(rank):
    mine, theirs = torch.full((2,), float(rank)), torch.empty(2)
    group = dist.new_group(backend="cpu:nccl_rules")
    with pytest.raises(dist.DistBackendError, match="first operation"):
        dist.isend(mine, 1 - rank, group)
    dist.barrier()
    with pytest.raises(dist.DistBackendError, match="must be in a batch"):
        dist.isend(mine, 1 - rank)
    send = dist.P2POp(dist.isend, mine, 1 - rank, tag=1 + rank)
    receive = dist.P2POp(dist.irecv, theirs, 1 - rank, tag=7)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert theirs.tolist() == [1 - rank] * 2


@ranks(2, manager=False)
def test_messages_of_unequal_length_break_the_group(rank):
    dist.barrier()
    (work,) = swap(torch.ones(2 + rank), torch.empty(2 + rank), 1 - rank)
    with pytest.raises(dist.DistBackendError, match="bytes"):
        work.wait()
    with pytest.raises(dist.DistBackendError, match="broken since"):
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("refused", "error", "text"),
    [
        (torch.ones(2, dtype=torch.int16), TypeError, "no data type"),
        (torch.ones(4)[::2], ValueError, "contiguous"),  # on a GPU it would be taken for one that is, without a word
    ],
    ids=["type", "strides"],
)
@ranks(2, manager=False)
def test_torch_leaves_a_batch_open_when_an_operation_is_refused(rank, refused, error, text):
    dist.barrier()
    with pytest.raises(error, match=text):
        swap(torch.ones(2), refused, 1 - rank)
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [1, 1]  # it was only collected: this is why distman closes the batch


@ranks(2, manager=False)
def test_calls_return_at_once_and_the_host_waits_later(rank):
    store = dist.distributed_c10d._get_default_store()
    mine = torch.ones(2)
    if rank == 0:
        works = [dist.all_reduce(mine, async_op=True) for _ in range(3)]
        assert not any(work.is_completed() for work in works)
        store.set("enqueued", "yes")
    else:
        store.wait(["enqueued"])
        works = [dist.all_reduce(mine, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    assert mine.tolist() == [8, 8]
    assert [one.tolist() for one in works[0].get_future().value()] == [[8, 8]]


@ranks(2, manager=False)
def test_all_ranks_must_enqueue_the_same_operations_in_the_same_order(rank):
    calls = [lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0)]
    with pytest.raises(dist.DistBackendError, match=r"same operations in the same order, got .* on rank"):
        calls[rank]()
    with pytest.raises(dist.DistBackendError, match="broken since"):
        dist.barrier()


@ranks(2, manager=False)
def test_to_leave_waits_for_what_is_outstanding_and_to_abort_does_not(rank):
    store = dist.distributed_c10d._get_default_store()
    left, aborted = (dist.new_group(backend="cpu:nccl_rules") for _ in range(2))
    dist.barrier()  # a rank may have its end of a connection before the other one has
    if rank == 0:
        mine = torch.ones(2)
        dist.all_reduce(mine, group=left, async_op=True)
        leaving = threading.Thread(target=backend_of(left).shutdown)
        leaving.start()
        work = dist.all_reduce(torch.ones(2), group=aborted, async_op=True)
        backend_of(aborted).abort()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            dist.barrier(aborted)
        assert leaving.is_alive()
        store.set("aborted", "yes")
        leaving.join()
        assert mine.tolist() == [2, 2]
    else:
        store.wait(["aborted"])
        dist.all_reduce(torch.ones(2), group=left)
        backend_of(left).shutdown()
