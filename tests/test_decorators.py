"""Functions that run on some ranks only: the results, the errors and the store, against what the docstrings say."""

import contextlib
import functools
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distman import DistmanError, DistributedManager, JobFailed, NotInitializedError, PlanMismatchError, RankFailedError
from distman._base.log import logger
from distman.collectives import all_gather_objects, all_gather_v, fused_all_reduce
from distman.decorators import (
    local_rank_zero_first,
    on_local_rank,
    on_rank,
    parallel_on_all_devices,
    rank_zero_first,
    rank_zero_only,
)
from distman.testing import ranks


class Writer:
    def __init__(self):
        self.written = []

    @rank_zero_only
    def write(self, text, *, end="."):
        """Write a text."""
        self.written.append(text + end)
        return len(self.written)


def all_are_well():
    """The group and the store are usable, and the ranks still in step."""
    manager = DistributedManager()
    assert all_gather_objects(manager.rank) == list(range(manager.world_size))
    manager.barrier("well")
    assert on_rank(manager.world_size - 1, broadcast=True)(lambda: "well")() == "well"


class TwoArgumentsError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class UnpicklableError(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@ranks(1, 3)
def test_it_runs_on_its_rank_and_the_others_get_none(rank, world_size):
    done = on_rank(world_size - 1)(lambda: DistributedManager().rank)()
    assert done == (rank if rank == world_size - 1 else None)


@ranks(1, 3)
def test_the_result_is_broadcast(world_size):
    @on_rank(world_size - 1, broadcast=True)
    def make(size, *, fill):
        return {"from": DistributedManager().rank, "values": torch.full((size,), fill)}

    made = make(3, fill=2.5)
    assert made["from"] == world_size - 1
    assert made["values"].tolist() == [2.5] * 3


@ranks(4)
def test_several_ranks_run(rank):
    for which in ([3, 1], (1, 3), range(1, 4, 2), {1, 3}, [3, 1, 3]):
        assert on_rank(which)(lambda: rank)() == (rank if rank in (1, 3) else None)
        assert on_rank(which, broadcast=True)(lambda: rank)() == 1
        all_are_well()


@ranks(3)
def test_the_others_wait_until_all_of_several_are_done(rank, tmp_path):
    folder = all_gather_objects(tmp_path)[0]

    @on_rank([0, 2])
    def write():
        time.sleep(0.3 * (rank == 2))
        (folder / f"{rank}").write_text("done")

    write()
    assert sorted(path.name for path in folder.iterdir()) == ["0", "2"]


@ranks(3)
def test_barrier_makes_the_runner_wait_too(rank):
    @on_rank(0, barrier=True)
    def note():
        return "done"

    if rank == 2:
        time.sleep(0.5)
    began = time.monotonic()
    note()
    waited = time.monotonic() - began
    assert waited < 0.3 if rank == 2 else waited > 0.3


@ranks(1, 3)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ValueError("no such file"), "no such file"),
        (lambda: TwoArgumentsError(3, "bad"), "3: bad"),
        (UnpicklableError, "holds a lock"),
        (SpeechlessError, "its __str__ raised RuntimeError"),
    ],
    ids=["plain", "two arguments", "unpicklable", "speechless"],
)
def test_an_error_is_raised_on_all_ranks_and_the_group_stays_usable(rank, world_size, make, text):
    original = make()

    @on_rank(world_size - 1)
    def fail():
        raise original

    is_runner = rank == world_size - 1
    with pytest.raises(type(original) if is_runner else RankFailedError) as caught:
        fail()
    all_are_well()
    error = caught.value
    if is_runner:
        assert error is original
        return
    assert isinstance(error, RuntimeError)
    assert (error.rank, error.error_type) == (world_size - 1, type(original).__name__)
    assert text in error.error_text
    assert "in fail" in error.traceback_text
    assert "raise original" in error.traceback_text
    assert error.host == DistributedManager().roll_call[world_size - 1].host


@ranks(3)
def test_the_first_of_several_errors_reaches_all(rank):
    @on_rank([0, 1])
    def fail():
        if rank == 0:
            time.sleep(0.3)
        raise ValueError(f"on {rank}")

    with pytest.raises((ValueError, RankFailedError), match="on 0" if rank == 0 else "on 1"):
        fail()
    all_are_well()


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "elsewhere", "name"),
    [(SystemExit, JobFailed, "exited"), (KeyboardInterrupt, RankFailedError, "KeyboardInterrupt")],
)
def test_the_end_of_the_program_on_the_runner_stays_what_it_is(rank, kind, elsewhere, name):
    @on_rank(1)
    def leave():
        raise kind(3)

    with pytest.raises(kind if rank == 1 else elsewhere) as caught:
        leave()
    if rank == 0:
        assert caught.value.error_type == name
    all_are_well()


@ranks(2)
def test_methods_names_and_arguments_are_kept(rank):
    writer = Writer()
    assert [writer.write("a"), writer.write("b", end="!")] == ([1, 2] if rank == 0 else [None, None])
    assert writer.written == (["a.", "b!"] if rank == 0 else [])
    assert Writer.write.__name__ == "write"
    assert Writer.write.__doc__ == "Write a text."


@ranks(3)
def test_long_work_trips_no_timeout_of_collectives():
    manager = DistributedManager()
    DistributedManager.cleanup()
    DistributedManager.initialize(timeout=0.5)
    assert on_rank(1, broadcast=True)(lambda: time.sleep(1.5) or "done")() == "done"
    manager.barrier()


@ranks(4)
def test_within_a_group_ranks_are_those_of_the_group(rank):
    DistributedManager.create_process_subgroup("pair", 2)
    assert on_rank(1, broadcast=True, group="pair")(lambda: rank)() == (1 if rank < 2 else 3)
    process_group = DistributedManager().group("pair")
    assert on_rank(0, group=process_group)(lambda: rank)() == (rank if rank in (0, 2) else None)
    with pytest.raises((ValueError, RankFailedError), match="boom") if rank < 2 else _nothing():
        on_rank(0, group="pair")(_boom_on)(0)
    all_are_well()


def _boom_on(rank):
    if DistributedManager().rank == rank:
        raise ValueError("boom")


class _nothing:  # noqa: N801 - reads like pytest.raises
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@ranks(3)
def test_nested_calls_wait_for_nobody(rank):
    inner_zero = on_rank(0, barrier=False)(lambda: f"inner on {rank}")
    inner_both = on_rank([0, 1], barrier=True, broadcast=True)(lambda: f"both on {rank}")

    @on_rank([0, 1])
    def outer():
        return inner_zero(), inner_both()

    assert outer() == [("inner on 0", "both on 0"), (None, "both on 1"), None][rank]
    all_are_well()


class Opened(torch.utils.data.Dataset):
    """Its only sample is what a function returns."""

    def __init__(self, find):
        self.find = find

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return str(self.find())


@pytest.mark.parametrize("decorator", [on_rank(0, broadcast=True), on_local_rank(0, broadcast=True)])
@ranks(1, 2)
def test_a_result_is_handed_out_to_nobody_where_nobody_waits(rank, decorator):
    find = decorator(lambda: 7)
    assert on_rank(0)(find)() == (7 if rank == 0 else None)
    found = "7" if rank == 0 else "None"
    assert list(torch.utils.data.DataLoader(Opened(find), batch_size=None, num_workers=1)) == [found]
    all_are_well()


@ranks(2)
def test_many_nested_calls_leave_the_outer_one_alone():
    inner = on_rank(0, broadcast=True)(lambda: "inner")

    @on_rank([0, 1])
    def outer():
        return [inner() for _ in range(140)]  # more than two pages of keys

    assert outer() == ["inner"] * 140
    all_are_well()


@ranks(3)
def test_a_nested_call_that_needs_a_waiting_rank_raises():
    @on_rank([0, 1])
    def outer():
        on_rank(0, broadcast=True)(lambda: 1)()

    with pytest.raises(DistmanError, match=r"on_rank\(0\) of .* must be called where all its ranks run"):
        outer()
    with pytest.raises((DistmanError, RankFailedError), match=r"on_local_rank\(0\) of .* must be called where all its"):
        on_rank(1)(on_local_rank(0, broadcast=True)(lambda: 1))()
    all_are_well()


@ranks(2)
@pytest.mark.parametrize(
    "call",
    [
        lambda: DistributedManager().barrier("inside"),
        lambda: fused_all_reduce({"x": torch.ones(2)}),
        lambda: all_gather_objects("x"),
        lambda: DistributedManager().group("node"),
        lambda: DistributedManager.create_process_subgroup("pair", 2),
    ],
    ids=["barrier", "fused_all_reduce", "all_gather_objects", "group", "groups"],
)
def test_waiting_for_others_where_only_some_run_is_an_error_at_once(rank, call):
    @on_rank(0)
    def work():
        call()

    kind = DistmanError if rank == 0 else RankFailedError
    with pytest.raises(kind, match=r"on_rank\(0\) of .*work\(\) at .*test_decorators.py:\d+") as caught:
        work()
    assert type(caught.value) is kind
    all_are_well()


@ranks(4)
def test_a_group_that_runs_there_as_a_whole_may_meet_there(rank):
    DistributedManager.create_process_subgroup("pair", 2)

    @on_rank([0, 1])
    def work():
        nested = on_rank(1, broadcast=True, group="pair")(lambda: rank)()
        return all_gather_objects(rank, "pair"), nested

    assert work() == (([0, 1], 1) if rank < 2 else None)
    all_are_well()


@ranks(2)
def test_backward_passes_are_an_error_at_once_where_only_some_run():
    gathered = all_gather_v(torch.ones(1, requires_grad=True)).sum()
    with pytest.raises(DistmanError, match=r"must be called where all its ranks run, .* within on_rank\(0\) of"):
        on_rank(0)(gathered.backward)()
    on_rank(0)(lambda: torch.nn.Linear(2, 2)(torch.ones(3, 2)).sum().backward())()  # which needs nobody else
    model = DistributedManager().wrap_ddp(torch.nn.Linear(2, 2))
    with pytest.raises(DistmanError, match=r"DistributedDataParallel that .* must be called .* within on_rank\(0\) of"):
        on_rank(0)(model)(torch.ones(3, 2))
    on_rank(0)(torch.no_grad()(model))(torch.ones(3, 2))
    on_rank(0)(lambda: model.module(torch.ones(3, 2)).sum().backward())()
    model(torch.ones(3, 2)).sum().backward()
    all_are_well()


@ranks(3)
def test_what_needs_only_ranks_that_run_there_works_there(rank):
    pair, alone = dist.new_group([0, 1]), [dist.new_group([one]) for one in range(3)][rank]

    @on_rank([0, 1])
    def work():
        model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=pair)
        model(torch.full((1, 1), float(rank))).sum().backward()
        dist.all_reduce(total := torch.ones(1), group=pair)
        dist.barrier(dist.new_group([0, 1], use_local_synchronization=True))
        dist.all_reduce(mine := torch.ones(1), group=alone)
        other = torch.zeros(1)
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(other, 0)
        objects = [None, None]
        dist.all_gather_object(objects, rank, pair)
        return model.module.weight.grad.item(), total.item(), mine.item(), other.item(), objects

    expected = [(0.5, 2, 1, 0, [0, 1]), (0.5, 2, 1, 2, [0, 1]), None][rank]
    assert work() == expected
    all_are_well()


@ranks(2)
def test_threads_that_were_started_outside_may_talk_to_others_meanwhile(rank):
    begun, entered = threading.Event(), threading.Event()
    total, later = torch.ones(1), torch.ones(1)

    def reduce_meanwhile():
        begun.set()
        entered.wait()
        dist.all_reduce(total)

    group = dist.new_group([0, 1])
    outside = threading.Thread(target=reduce_meanwhile)
    outside.start()
    begun.wait()
    over = threading.Event()
    inside = threading.Thread(target=lambda: (over.wait(), dist.all_reduce(later, group=group)))

    @on_rank(0)
    def work():
        entered.set()
        outside.join()
        inside.start()

    if rank == 1:
        entered.set()
    work()
    if rank == 1:
        inside.start()
    over.set()
    for thread in (outside, inside):
        thread.join()
    assert (total, later) == (2, 2)
    all_are_well()


@ranks(1, 2)
def test_a_rank_that_the_world_does_not_have_is_not_there(rank, world_size, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning", lambda *message: warnings.append(message[1]))
    assert on_rank([0, 2], broadcast=True)(lambda: rank)() == 0
    assert on_rank(range(world_size - 1, 100))(lambda: rank)() == (rank if rank == world_size - 1 else None)
    assert not warnings
    for nobody in (on_rank([2, 3], barrier=True, broadcast=True), on_local_rank(2, broadcast=True)):
        work = nobody(lambda: 1 / 0)
        assert (work(), work()) == (None, None)
    assert [what.partition(" of ")[0] for what in warnings] == ["on_rank([2, 3])", "on_local_rank(2)"] * (rank == 0)
    all_are_well()


@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        (-1, ValueError),
        ([], ValueError),
        ([0, -2], ValueError),
        *((wrong, TypeError) for wrong in (True, [True], "0", "01", 1.0, [0.5], None, [[0]], len, dict)),
    ],
)
@pytest.mark.parametrize("restrict", [on_rank, on_local_rank])
def test_what_is_no_rank_is_an_error_at_once(restrict, rank, kind):
    with pytest.raises(kind, match="with parentheses" if callable(rank) else r"^rank must "):
        restrict(rank)


@pytest.mark.parametrize(
    "ranks", [np.int64(0), np.array([0, 1]), torch.tensor(0), torch.tensor([0]), {0: 1}, iter([0])]
)
def test_ranks_may_be_numbers_of_any_library(ranks):
    assert on_rank(ranks)(lambda: 7)() == 7


def generate():
    yield 1


async def wait():
    pass


class Lazy:
    def __call__(self):
        yield


NO_FUNCTIONS = {
    "generator": generate,
    "coroutine": wait,
    "callable generator": Lazy(),
    "partial generator": functools.partial(generate),
    "context manager": contextlib.contextmanager(generate),
    "asynchronous one": contextlib.asynccontextmanager(generate),
    "partial context manager": functools.partial(contextlib.contextmanager(generate)),
    "class method that generates": classmethod(generate),
    "class": Writer,
    "property": property(len),
    "cached property": functools.cached_property(len),
    "partial method": functools.partialmethod(len),
    "single dispatch method": functools.singledispatchmethod(len),
    "number": 3,
}


@pytest.mark.parametrize("name", NO_FUNCTIONS)
@pytest.mark.parametrize("restrict", [on_rank(0), rank_zero_only, on_local_rank(0)])
def test_what_is_no_function_that_runs_when_it_is_called_is_refused(restrict, name):
    with pytest.raises(TypeError, match=r"^(the function must run when it is called|what runs on some ranks must be)"):
        restrict(NO_FUNCTIONS[name])


class Methods:
    @rank_zero_only
    @classmethod
    def outside_of_class_method(cls):
        return cls.__name__

    @classmethod
    @on_rank(0)
    def inside_of_class_method(cls):
        return cls.__name__

    @on_rank(0)
    @staticmethod
    def static(number):
        return number

    @property
    @on_local_rank(0)
    def below_property(self):
        return 8


def test_methods_of_all_kinds():
    for owner in (Methods, Methods()):
        found = owner.outside_of_class_method(), owner.inside_of_class_method(), owner.static(4)
        assert found == ("Methods", "Methods", 4)
    assert Methods().below_property == 8


@pytest.mark.parametrize(
    "function", [functools.partial(max, 3), functools.partial(complex, 3), abs, torch.nn.Identity()]
)
def test_whatever_can_be_called_runs(function):
    assert on_rank(0)(function)(4) is not None


@ranks(2)
def test_ranks_that_call_differently_are_told(rank):
    first, second = on_rank(0)(lambda: "first"), on_rank(0)(len)
    if rank == 0:
        assert first() == "first"
    else:
        with pytest.raises(PlanMismatchError, match=r"got on_rank\(0\) of len\(\) on rank 1 .* and .*lambda"):
            second([])
    all_are_well()


def test_alone_and_not_initialized_it_runs_as_rank_zero(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert on_rank(0, barrier=True, broadcast=True)(lambda: 7)() == 7
    assert on_local_rank(0, broadcast=True)(lambda: 8)() == 8
    with rank_zero_first(), local_rank_zero_first():
        pass
    assert on_rank(1)(lambda: 7)() is None
    assert on_local_rank(1)(lambda: 7)() is None
    assert on_rank([0, 1], broadcast=True)(lambda: 7)() == 7
    with pytest.raises(ValueError, match="boom"):
        on_rank(0)(_raise_boom)()


def _raise_boom():
    raise ValueError("boom")


def test_under_a_launcher_the_manager_must_be_initialized(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotInitializedError):
        on_rank(0)(lambda: 7)()


@ranks(3)
def test_on_local_rank_runs_on_one_rank_of_each_host(rank):
    assert on_local_rank(1)(lambda: rank)() == (1 if rank == 1 else None)
    assert on_local_rank(2, broadcast=True)(lambda: rank)() == 2
    assert on_local_rank(3)(lambda: rank)() is None
    with pytest.raises(ValueError if rank == 1 else RankFailedError, match="boom"):
        on_local_rank(1)(_raise_boom)()
    all_are_well()


@ranks(3)
@pytest.mark.parametrize("first", [rank_zero_first, local_rank_zero_first])
def test_rank_zero_goes_first(rank, tmp_path, first):
    file = all_gather_objects(tmp_path)[0] / "file"
    with first():
        if rank == 0:
            time.sleep(0.3)
            file.write_text("made")
        assert file.read_text() == "made"
    all_are_well()


@ranks(3)
@pytest.mark.parametrize("first", [rank_zero_first, local_rank_zero_first])
def test_an_error_of_the_first_releases_the_others(rank, first):
    entered = []

    def enter():
        with first():
            entered.append(rank)
            raise ValueError("boom")

    with pytest.raises(ValueError if rank == 0 else RankFailedError, match="boom"):
        enter()
    assert entered == [0] * (rank == 0)
    all_are_well()


@ranks(2)
def test_no_collective_where_ranks_run_one_after_another():
    with pytest.raises(DistmanError, match=r"rank_zero_first at .*test_decorators"), rank_zero_first():
        DistributedManager().barrier()


@ranks(2)
def test_ranks_may_come_to_a_block_from_different_lines(rank):
    if rank == 0:
        with rank_zero_first():
            pass
    else:
        with rank_zero_first():
            pass
    all_are_well()


@ranks(2)
def test_two_thousand_calls_leave_the_store_as_it_was():
    store = DistributedManager()._state.job.rendezvous.store
    work = on_rank(0)(lambda: None)
    both = on_rank([0, 1])(lambda: None)
    for _ in range(200):
        work()
        both()
    dist.barrier()
    before = store.num_keys()
    for _ in range(1_900):
        work()
    for _ in range(100):
        both()
        with rank_zero_first():
            pass
    dist.barrier()
    assert store.num_keys() < before + 100


@ranks(2)
def test_memory_stays_flat():
    work = on_rank(0)(lambda: None)
    for _ in range(1_000):
        work()
    before = sys.getallocatedblocks()
    for _ in range(1_000):
        work()
    assert sys.getallocatedblocks() - before < 1_000


def test_on_one_device_a_parallel_function_runs_as_it_is():
    @parallel_on_all_devices
    def double(batch, *, shift):
        """Double."""
        return 2 * batch + shift

    assert double(torch.ones(3), shift=1).tolist() == [3, 3, 3]
    assert double.__doc__ == "Double."


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_on_all_devices_a_parallel_function_gives_what_one_gives():
    weight = torch.arange(8.0)

    @parallel_on_all_devices
    def scale(batch):
        return batch * weight.to(batch.device)

    batch = torch.randn(64, 8, device="cuda:0")
    assert torch.equal(scale(batch).cpu(), batch.cpu() * weight)
