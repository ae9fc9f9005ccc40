"""Ranks that wait for each other in different calls, and errors whose handlers wait for ranks that wait elsewhere."""

import contextlib
import gc
import itertools
import random
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, JobFailed, PlanMismatchError, on_rank, surviving_failure
from distman._coordination import protocol
from distman.checkpoint import load, save
from distman.collectives import all_gather_objects, all_gather_v, fused_all_reduce, gather_v
from distman.testing import ranks
from tests.launch.processes import poll

SHORT = 0.05  # seconds that a wait lasts before it is told
DRAWN = random.Random(34)  # noqa: S311 - draws cases

OURS = {
    "all_gather_objects": lambda: all_gather_objects({"a": 1}),
    "all_gather_v": lambda: all_gather_v(torch.ones(2)),
    "barrier": lambda: DistributedManager().barrier("end"),
    "fused_all_reduce": lambda: fused_all_reduce([torch.ones(3)]),
    "load": lambda: load("there.pt"),
    "on_rank(0)": lambda: on_rank(0)(lambda: None)(),
    "other barrier": lambda: DistributedManager().barrier("begin"),
    "save": lambda: save({"a": 1}, "state.pt"),
}
OF_TORCH = {
    "all_gather": lambda: dist.all_gather([torch.ones(1)] * 3, torch.ones(1)),
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "barrier of torch": dist.barrier,
}
ALL = OURS | OF_TORCH
FOR_SOME = {
    "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 2),
    "DDP": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)),
    "gather": lambda: dist.gather(torch.ones(1), [torch.ones(1) for _ in range(3)], dst=1),
    "reduce": lambda: dist.reduce(torch.ones(1), 1),
    "scatter": lambda: dist.scatter(torch.ones(1), src=2),
}
"""In which rank 1 waits for others, that may not wait for it there."""

DONE_BY_RANK_0 = {"on_rank(0)", "save"}  # where it waits for nobody
SECTIONS = DONE_BY_RANK_0 | {"load"}  # which meet over the store, and tell each other apart there


def pairs(names, waiting):
    """Each of the names beside another one in which rank 0 waits, drawn so that all of those are in some pair."""
    drawn = itertools.cycle(DRAWN.sample(sorted(waiting), len(waiting)))
    return [(next(one for one in drawn if one != name and not {one, name} <= SECTIONS), name) for name in sorted(names)]


PAIRS = pairs(OURS, set(OURS) - DONE_BY_RANK_0)
WITH_ERROR = [pair[::-1] for pair in pairs(ALL, set(ALL) - DONE_BY_RANK_0)]


def wait_until_told(rank):
    """Wait until a rank has told the others that it waits."""
    group = DistributedManager()._state.job.store_group()
    with contextlib.closing(group.job_store.clone()) as store:
        assert poll(lambda: store.check([protocol.waiting(rank)]), 60)


def begin(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.chdir(tmp_path)
    torch.save({}, "there.pt")
    monkeypatch.setattr("distman._base.timing.MUTUAL_WAIT", SHORT)
    return DistributedManager.initialize(timeout=60)


@pytest.mark.parametrize(("one", "other"), PAIRS)
@ranks(3, manager=False)
def test_both_raise_with_both_lines(monkeypatch, tmp_path, rank, one, other):
    begin(monkeypatch, tmp_path)
    with pytest.raises(
        PlanMismatchError, match=r"(?s)two (differ|wait for each other).*\n  rank [0-2] .*test_dead"
    ) as e:
        OURS[one if rank == 0 else other]()
    assert str(e.value).count("test_deadlocks.py:") == 2


@pytest.mark.parametrize("name", ["all_reduce", "barrier of torch"])
@ranks(3, manager=False)
def test_torchs_collectives_where_only_some_ranks_run_end_the_job(monkeypatch, tmp_path, name):
    begin(monkeypatch, tmp_path)
    with surviving_failure() as failure:
        on_rank(0)(OF_TORCH[name])()
    assert "waits for ever: all ranks must make the same calls in the same order" in str(failure.error)


@pytest.mark.parametrize(("one", "other"), WITH_ERROR)
@ranks(3, manager=False)
def test_the_error_of_a_rank_that_waits_in_its_handler_is_that_of_the_job(monkeypatch, tmp_path, rank, one, other):
    begin(monkeypatch, tmp_path)
    if rank == 1:
        with pytest.raises(ValueError, match="boom"):
            fail_and_then(ALL[one])
    else:
        with pytest.raises(JobFailed, match=r"rank 1 .*raised ValueError: boom"):
            ALL[other]()


@pytest.mark.parametrize("one", ["all_gather_objects", "all_gather_v", "all_reduce", "recv"])
@ranks(3, manager=False)
def test_it_waits_no_longer_where_the_others_survive(monkeypatch, tmp_path, rank, one):
    begin(monkeypatch, tmp_path)
    if rank == 1:
        with pytest.raises(ValueError, match="boom"):
            fail_and_then((ALL | {"recv": lambda: dist.recv(torch.ones(1), 2)})[one])
        (tmp_path / "is out").touch()
    else:
        with surviving_failure():
            DistributedManager().barrier()
        assert poll((tmp_path / "is out").exists, 60)


@pytest.mark.parametrize("code", [3, True, "no data", [1]], ids=repr)
@ranks(3, manager=False)
def test_so_it_is_where_the_rank_exits(monkeypatch, tmp_path, rank, code):
    one, other = random.Random(repr(code)).choice(WITH_ERROR)  # noqa: S311 - draws a case
    begin(monkeypatch, tmp_path)
    if rank == 1:
        with pytest.raises(SystemExit) as caught:
            fail_and_then(ALL[one], SystemExit(code))
        assert caught.value.code is code
    else:
        end = f"{3 if code == 3 else 1}, by .*{': no data' if code == 'no data' else 'SystemExit.'}"
        with pytest.raises(JobFailed, match=rf"rank 1 .* ended with exit code {end}"):
            ALL[other]()


class Exit(SystemExit):
    """One that can be seen to be dropped."""


@pytest.mark.parametrize("one", ["all_gather_v", "all_reduce", "barrier"])
@ranks(3, manager=False)
def test_its_exit_is_dropped_where_it_leaves_the_program(monkeypatch, tmp_path, rank, one):
    """There it is told: what the interpreter drops later meets one that is taken apart."""
    begin(monkeypatch, tmp_path)

    def leave():
        try:
            try:
                raise Exit(3)
            finally:
                ALL[one]()
        except Exit as error:
            return weakref.ref(error)

    if rank != 1:
        with pytest.raises(JobFailed, match="ended with exit code 3"):
            fused_all_reduce([torch.ones(3)])
        return
    gc.disable()
    try:
        assert leave()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("code", [0, None])
@ranks(3, manager=False)
def test_a_rank_whose_exit_code_would_hide_the_failure_raises_it(monkeypatch, tmp_path, rank, code):
    begin(monkeypatch, tmp_path)
    barrier = DistributedManager().barrier
    calls = {1: lambda: fail_and_then(lambda: barrier("end"), SystemExit(code))}
    with pytest.raises(JobFailed, match="ended with exit code 0"):
        calls.get(rank, lambda: barrier("begin"))()


@ranks(3, manager=False)
def test_another_exit_than_the_one_on_record_is_not_raised_again(monkeypatch, tmp_path, rank):
    begin(monkeypatch, tmp_path)
    if rank == 1:
        with pytest.raises(SystemExit, match="3"):
            fail_and_then(lambda: DistributedManager().barrier("end"), SystemExit(3))
        with pytest.raises(JobFailed, match="ended with exit code 3"):
            fail_and_then(lambda: DistributedManager().barrier("bye"), SystemExit(4))
    else:
        with pytest.raises(JobFailed, match="ended with exit code 3"):
            DistributedManager().barrier("begin")


@ranks(3, manager=False)
def test_a_thread_that_waits_with_its_error_ends_the_main_program_too(monkeypatch, tmp_path, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distman._base.timing.MUTUAL_WAIT", SHORT)
    manager = DistributedManager.initialize(timeout=60, fail_with_threads=True)
    with surviving_failure() as failure:
        if rank == 1:
            threading.Thread(target=fail_and_then, args=(ALL["all_gather_v"],), daemon=True).start()
            threading.Event().wait(60)
        manager.barrier()
    assert "rank 1" in str(failure.error)
    assert "raised ValueError: boom" in str(failure.error)


@ranks(3, manager=False)
def test_a_rank_one_of_whose_threads_exits_has_failed_too(monkeypatch, tmp_path, rank):
    begin(monkeypatch, tmp_path)
    with surviving_failure() as failure:
        if rank == 1:
            with contextlib.suppress(SystemExit):
                in_a_thread(lambda: fail_and_then(ALL["all_gather_v"], SystemExit("boom")))
            threading.Event().wait(60)
        DistributedManager().barrier()
    assert "rank 1" in str(failure.error)
    assert "ended a thread by sys.exit() or SystemExit: boom" in str(failure.error)


@pytest.mark.parametrize("one", sorted(FOR_SOME))
@ranks(3, manager=False)
def test_so_it_is_where_its_handler_waits_for_some(monkeypatch, tmp_path, rank, one):
    other = random.Random(one).choice(["all_gather_v", "all_reduce", "barrier", "barrier of torch"])  # noqa: S311
    begin(monkeypatch, tmp_path)
    if rank == 1:
        with pytest.raises((ValueError, RuntimeError)) as caught:  # of a constructor's connection, as it raises it
            fail_and_then(FOR_SOME[one])
        assert "boom" in f"{caught.value} {caught.value.__context__}"
    else:
        with pytest.raises(JobFailed, match=r"rank 1 .*raised ValueError: boom"):
            ALL[other]()


@pytest.mark.parametrize(
    ("one", "other"), [("recv", "all_gather_v"), ("recv", "all_reduce"), ("send", "all_reduce"), ("send", "barrier")]
)
@ranks(3, manager=False)
def test_so_it_is_where_its_handler_waits_for_a_message(monkeypatch, tmp_path, rank, one, other):
    begin(monkeypatch, tmp_path)
    calls = {"recv": lambda to: dist.recv(torch.ones(1), to), "send": lambda to: dist.send(torch.ones(2**24), to)}
    if rank == 1:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            fail_and_then(lambda: calls[one](2))
        assert "boom" in f"{caught.value} {caught.value.__context__}"
    else:
        with pytest.raises(JobFailed, match=r"rank 1 .*raised ValueError: boom"):
            ALL[other]()


@ranks(2, manager=False)
def test_nothing_fails_where_a_message_is_late_or_large(monkeypatch, tmp_path, rank):
    """Nor where it is under way while the rank that has sent it waits for something else."""
    begin(monkeypatch, tmp_path)
    large = torch.ones(2**23)  # more than what sockets hold
    for late in range(2):
        try:
            raise KeyError("in hand")
        except KeyError:
            if rank == late:
                wait_until_told(1 - rank)
            dist.send(large, 1) if rank == 0 else dist.recv(large, 0)
    if rank == 0:
        work = dist.isend(large, 1)
        DistributedManager().barrier()
        work.wait()
    else:
        wait_until_told(0)  # in its barrier
        dist.recv(large, 0)
        DistributedManager().barrier()


@ranks(3, manager=False)
def test_nothing_fails_where_who_sends_or_receives_is_late(monkeypatch, tmp_path, rank):
    begin(monkeypatch, tmp_path)
    calls = {
        "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 2),
        "gather": lambda: dist.gather(torch.ones(1), [torch.ones(1) for _ in range(3)] if rank == 1 else None, dst=1),
        "reduce": lambda: dist.reduce(torch.ones(1), 1),
        "scatter": lambda: dist.scatter(torch.ones(1), [torch.ones(1)] * 3 if rank == 2 else None, src=2),
    }
    assert {*calls} == {*FOR_SOME} - {"DDP"}
    for call, late in itertools.product(calls.values(), range(3)):
        try:
            raise KeyError("in hand")
        except KeyError:
            time.sleep(10 * SHORT * (rank == late))
            call()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("one", "other"), DRAWN.sample(WITH_ERROR, 4))
@ranks(3, manager=False)
def test_so_it_is_where_they_wait_in_threads(monkeypatch, tmp_path, rank, one, other):
    begin(monkeypatch, tmp_path)
    if rank == 1:
        with pytest.raises(ValueError, match="boom"):
            in_a_thread(lambda: fail_and_then(ALL[one]))
    else:
        with surviving_failure() as failure:  # raised in the thread and in the main thread, in either order
            in_a_thread(ALL[other])
        assert "boom" in str(failure.error)


def in_a_thread(call):
    raised = []

    def work():
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the test waits
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    raise raised[0]


def fail_and_then(wait, error=None):
    try:
        raise error or ValueError("boom")
    finally:
        wait()


@pytest.mark.parametrize("place", range(3))
@ranks(3, manager=False)
def test_nothing_fails_where_all_raise_and_meet_or_one_is_late(monkeypatch, tmp_path, rank, place):
    begin(monkeypatch, tmp_path)
    for name in sorted(ALL)[place::3]:
        with pytest.raises(ValueError, match="boom"):
            fail_and_then(lambda call=ALL[name]: (time.sleep(10 * SHORT * rank), call()))
        try:
            raise KeyError("in hand for all of the rest")
        except KeyError:
            time.sleep(10 * SHORT * (2 - rank))
            ALL[name]()
            dist.all_reduce(torch.ones(1))


@ranks(3, manager=False)
def test_a_rank_that_has_done_its_part_is_not_waited_for(monkeypatch, tmp_path, rank):
    """Rank 2 sends, and waits in a barrier for rank 0, which waits for rank 1, which is late."""
    manager = begin(monkeypatch, tmp_path)
    for _ in range(3):
        if rank == 1:
            time.sleep(10 * SHORT)
        gather_v(torch.ones(2))
        manager.barrier()
        work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 2 else None
        if rank == 1:
            time.sleep(10 * SHORT)
        if work is None:
            dist.all_reduce(torch.ones(1))
        manager.barrier()
        if work is not None:
            work.wait()


@pytest.mark.parametrize(
    ("num_messages", "collective"), [(2, "gather"), (5, "reduce"), (2, "all_reduce"), (5, "all_reduce")]
)
@ranks(3, manager=False)
def test_so_it_is_after_messages_which_count_as_collectives(monkeypatch, tmp_path, rank, num_messages, collective):
    """Rank 1 is late, rank 0 waits for it, and rank 2, which has done its part, waits for both."""
    manager = begin(monkeypatch, tmp_path)
    for _ in range(num_messages):
        if rank == 0:
            dist.send(torch.ones(4), 1)
        elif rank == 1:
            dist.recv(torch.empty(4), 0)
    if rank == 1:
        time.sleep(10 * SHORT)
    if collective == "gather":
        dist.gather(torch.ones(1), [torch.empty(1) for _ in range(3)] if rank == 0 else None, dst=0)
    elif collective == "reduce":
        dist.reduce(torch.ones(1), 0)
    elif rank == 2:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    else:
        dist.all_reduce(torch.ones(1))
    manager.barrier()
    if rank == 2 and collective == "all_reduce":
        work.wait()


@ranks(2, manager=False)
def test_a_thread_of_the_program_may_do_what_the_main_thread_does_not(monkeypatch, tmp_path, rank):
    manager = begin(monkeypatch, tmp_path)
    group = manager.create_process_subgroup("pair", 2)
    assert group is None
    first, second = (lambda: all_gather_v(torch.ones(1), group="pair")), manager.barrier
    other = threading.Thread(target=first)

    def late():
        time.sleep(10 * SHORT)
        first()

    if rank == 0:
        other.start()
        second()
    else:
        thread = threading.Thread(target=late)
        thread.start()
        second()
        thread.join()
    if rank == 0:
        other.join()
