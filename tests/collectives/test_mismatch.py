"""Calls that do not match, without debug mode: all ranks raise, and name two of them."""

import contextlib
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distman import DistributedManager, PlanMismatchError
from distman._coordination import protocol
from distman._coordination.tracking import Call
from distman._torch_internals import batch_isend_irecv, default_store
from distman.collectives import (
    all_gather_objects,
    all_gather_v,
    all_to_all_v,
    distributed_transpose,
    fused_all_reduce,
    gather_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.collectives._exchange import exchange
from distman.fft import fft, fft2, ifft
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region
from distman.testing import ranks

BOTH = [torch.float32, torch.float64]


def gather_with_gradient(rank, group):
    """The outputs are used by one rank's loss only; the next calls of the two do not match."""
    mine = torch.ones(2, requires_grad=True)
    full = all_gather_v(mine, [2, 2], group=group)
    if rank == 0:
        full.sum().backward()
    reduce_scatter_v(full.detach(), [2, 2], group=group)


def unlike_losses_in_second_order(rank, group):
    mine = torch.ones(2, requires_grad=True)
    loss = copy_to_parallel_region(mine, group).square().sum()
    (grad,) = torch.autograd.grad(loss, mine, create_graph=True)
    if rank == 0:
        grad.sum().backward()
    else:
        all_gather_v(mine.detach(), group=group)


# What each rank calls, with its rank and the group, and what the message must say.
CALLS = {
    "operations": (
        lambda rank, group: (
            all_gather_v(torch.ones(2), [2, 2], group=group)
            if rank
            else reduce_scatter_v(torch.ones(2), [1, 1], group=group)
        ),
        r"reduce_scatter_v .*\n.* all_gather_v ",
    ),
    "dtype": (lambda rank, group: all_gather_v(torch.ones(2, dtype=BOTH[rank]), [2, 2], group=group), "float64"),
    "shape": (lambda rank, group: all_gather_v(torch.ones(2, 3 + rank), [2, 2], group=group), r"\(\*, 4\)"),
    "sizes": (lambda rank, group: all_gather_v(torch.ones(2 - rank), [[2, 2], [1, 1]][rank], group=group), "1, 1"),
    "sizes on one": (lambda rank, group: all_gather_v(torch.ones(2), [2, 2] if rank else None, group=group), "numbers"),
    "dim": (lambda rank, group: all_gather_v(torch.ones(2, 2), [2, 2], dim=rank, group=group), "dim 1"),
    "use_fp32": (
        lambda rank, group: reduce_scatter_v(torch.ones(2), [1, 1], use_fp32=rank == 0, group=group),
        "use_fp32 False",
    ),
    "shape of a sum": (lambda rank, group: reduce_from_parallel_region(torch.ones(2 + rank), group), r"\(3\)"),
    "dtype of a large sum": (
        lambda rank, group: reduce_from_parallel_region(torch.ones(9000, dtype=BOTH[rank]), group),
        "float64",
    ),
    "fused beside a sum": (
        lambda rank, group: (
            fused_all_reduce(torch.ones(2), group=group) if rank else reduce_from_parallel_region(torch.ones(2), group)
        ),
        "fused_all_reduce",
    ),
    "fused and waited for later": (
        lambda rank, group: (
            all_gather_v(torch.ones(2), [2, 2], group=group)
            if rank
            else fused_all_reduce(torch.ones(2), group=group, async_op=True)[1].wait()
        ),
        r"fused_all_reduce the first message.*\n  rank 1 .* all_gather_v ",
    ),
    "dst": (lambda rank, group: gather_v(torch.ones(2), [2, 2], dst=rank, group=group), "dst 1"),
    "dst that only receives": (lambda rank, group: gather_v(torch.ones(2), [2, 2], 0, 1 - rank, group), "dst 0"),
    "src": (lambda rank, group: scatter_v(torch.ones(2), [1, 1], src=rank, group=group), "from group rank 1"),
    "gradient": (
        lambda rank, group: all_gather_v(torch.ones(2, requires_grad=rank == 0), [2, 2], group=group),
        "gradient True",
    ),
    "matrix": (
        lambda rank, group: all_to_all_v(torch.ones(2), [[[1, 1], [1, 1]], [[0, 2], [2, 0]]][rank], group=group),
        r"\[\[0, 2\], \[2, 0\]\]",
    ),
    "sizes of a transpose": (
        lambda rank, group: distributed_transpose(torch.ones(2, 2), 0, 1, group, sizes=[[2, 3], [3, 2]][rank]),
        r"sizes \[3, 2\]",
    ),
    "length of a transpose": (
        lambda rank, group: distributed_transpose(torch.ones(4 + 3 * rank, 2), 0, 1, group, sizes=[2, 2]),
        r"and 4 along dim 0 .*\n  rank 1 .* and 7 along dim 0",
    ),
    "length of a transpose, in parts of one length": (
        lambda rank, group: distributed_transpose(torch.ones(2, 5 + rank), -1, 0, group, sizes=[2, 2]),
        "6 along dim 1",
    ),
    "norm of a transform": (
        lambda rank, group: fft2(torch.ones(2, 4), norm=[None, "ortho"][rank], sizes=[2, 2], group=group),
        "ortho",
    ),
    "length of a transform": (
        lambda rank, group: fft(torch.ones(2, 4 + rank), dim=0, shard_dim=0, sizes=[2, 2], group=group),
        r"\(\*, 5\)",
    ),
    "dim of a transform": (
        lambda rank, group: ifft(torch.ones(2, 4, 4), dim=1 + rank, shard_dim=0, out_dim=1, sizes=[2, 2], group=group),
        "along 2 of 4",
    ),
    "objects beside tensors": (
        lambda rank, group: all_gather_objects(3, group) if rank else all_gather_v(torch.ones(2), group=group),
        "all_gather_objects",
    ),
    "output unused on one": (gather_with_gradient, "a backward pass reduce_scatter"),
    "second order on one": (unlike_losses_in_second_order, "a backward pass"),
}


@pytest.mark.gloo_only("NCCL has no tags, by which messages of unlike calls are told apart")
@ranks(2, manager=False)
def test_both_calls_are_named_on_both_ranks_and_other_groups_go_on(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.setattr("distman._base.timing.MUTUAL_WAIT", 0.05)
    DistributedManager.initialize(timeout=30)
    for name, (call, text) in CALLS.items():
        DistributedManager.create_process_subgroup(name, 2)
        all_gather_v(torch.ones(rank + 1), group=name)
        with pytest.raises(PlanMismatchError, match=rf"(?s)of group {name}, but two differ.*\n  rank 0 .*{text}") as e:
            call(rank, name)
        rows = str(e.value).splitlines()[1:]
        assert [row.split(" (")[0] for row in rows] == ["  rank 0", "  rank 1"], name
        assert all("test_mismatch.py:" in row for row in rows), name
    with pytest.raises(RuntimeError):  # what was sent cannot be told from what comes later
        all_gather_v(torch.ones(2), [2, 2], group=name)
    assert all_gather_v(torch.ones(rank + 1)).tolist() == [1] * 3


@pytest.mark.gloo_only("NCCL has no tags, by which messages of unlike calls are told apart")
@ranks(4, manager=False)
def test_a_rank_that_differs_among_several_and_one_that_is_late(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.setattr("distman._base.timing.MUTUAL_WAIT", 0.05)
    manager = DistributedManager.initialize(timeout=30)
    store = manager._state.job.rendezvous.store
    if rank == 3:  # comes when the others have told that they wait
        while not store.check([protocol.waiting(one) for one in range(3)]):
            pass
    assert all_gather_v(torch.ones(2), [2] * 4).tolist() == [1] * 8
    with pytest.raises(PlanMismatchError, match=r"(?s)two differ.* sizes \[2, 2, 2, 1\]"):
        all_gather_v(torch.ones(2 if rank < 3 else 1), [2, 2, 2, 2] if rank < 2 else [2, 2, 2, 1])


@pytest.mark.gloo_only("NCCL aborts a group at once")
@ranks(3)
def test_a_wait_is_ended_though_the_connection_to_another_rank_is_closed_already(rank):
    call, store = Call(DistributedManager().resolve_group(None), 0, "a call"), default_store()
    if rank == 1:
        call.interrupt()
        store.set("closed", "yes")
    elif rank == 0:
        store.wait(["closed"])
        work = dist.irecv(torch.empty(1), 2)
        with contextlib.suppress(RuntimeError):
            while True:  # it takes the system a moment to tell
                dist.irecv(torch.empty(1), 1)
        call.interrupt()
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=20))
        assert "20000ms" not in str(caught.value)
    store.set(f"{rank} is done", "yes")
    store.wait([f"{other} is done" for other in range(3)])


@ranks(2, 3)
def test_all_ranks_count_alike_in_calls_drawn_at_random(rank, world_size):
    """Their numbers tell calls apart, so a rank that counted less would accuse others that are only late."""
    draw = random.Random(7)  # noqa: S311 - no secret
    group = DistributedManager().resolve_group(None)
    for _ in range(40):
        sizes = [draw.randint(0, 2) for _ in range(world_size)]
        full = torch.ones(sum(sizes), 2, requires_grad=draw.random() < 0.5)
        choice = draw.randrange(6)
        if choice == 0:
            result = all_gather_v(torch.ones(sizes[rank], 2), sizes if draw.random() < 0.5 else None)
        elif choice == 1:
            result = gather_v(torch.ones(sizes[rank], 2), dst=draw.randrange(world_size))
        elif choice == 2:
            result = scatter_v(full if rank == 1 else None, sizes, src=1)
        elif choice == 3:
            result = reduce_scatter_v(full, sizes)
        elif choice == 4:
            result = reduce_from_parallel_region(torch.ones(draw.randint(0, 9000)))
        else:
            result = fused_all_reduce(torch.ones(draw.randint(0, 900)))
        if result.requires_grad:
            result.sum().backward()
    counts = all_gather_objects(next(group.exchanges))
    assert len(set(counts)) == 1


@ranks(2)
def test_an_exchange_that_is_cut_short_closes_the_group(rank):
    def interrupt(*_):
        raise KeyboardInterrupt

    DistributedManager.create_process_subgroup("pair", 2)
    group = DistributedManager().resolve_group("pair")
    all_gather_v(torch.ones(1 + rank), group="pair")
    if rank == 0:
        target = torch.empty(2)
        mine = torch.ones(2)
        target.copy_ = interrupt
        with pytest.raises(KeyboardInterrupt):
            exchange([mine, mine], [target, torch.empty(2)], group)
    with pytest.raises(RuntimeError):
        all_gather_v(torch.ones(3), [3, 3], group="pair")
    assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@ranks(2)
def test_a_batch_that_is_cut_short_leaves_reductions_as_they_were(rank, error):
    """NCCL collects a batch, and torch would leave that state open: later reductions would only be collected."""

    class Cut(dist.P2POp):
        @property
        def tag(self):
            raise error

        @tag.setter
        def tag(self, _):
            pass

    mine = torch.ones(2)
    distributed_c10d._world.pg_coalesce_state[dist.group.WORLD] = []
    with pytest.raises(error):
        batch_isend_irecv([Cut(dist.isend, mine, 1 - rank)])
    dist.all_reduce(mine)
    assert mine.tolist() == [2, 2]


@ranks(2)
def test_pieces_of_two_bytes_travel_as_bytes(rank):
    for dtype in (torch.int16, torch.bool, torch.uint8):
        shard = torch.tensor([[rank, 1]], dtype=dtype).expand(2, 2)
        assert all_gather_v(shard).tolist() == torch.tensor([[0, 1]] * 2 + [[1, 1]] * 2, dtype=dtype).tolist()
