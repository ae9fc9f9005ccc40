"""Messages through the memory of processes of one host: order, room, several threads, and what ends a wait."""

import contextlib
import gc
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, _host_channels
from distman._host_channels import Channels, Introduction, close_those_of, keep_for
from distman._torch_internals import gloo_timeout, is_lost_connection
from distman.collectives import _local_messages, all_gather_v, broadcast_data, fused_all_reduce, scatter_v
from distman.collectives._exchange import all_gather_numbers, exchange
from distman.collectives._local_messages import agreement_in
from distman.collectives._shared_memory import VARIABLE
from distman.collectives._validation import resolve_group
from distman.decorators import on_rank
from distman.errors import DistmanError, JobFailed, PlanMismatchError
from distman.metrics import reduce_loss
from distman.testing import kill_rank, ranks

LIMIT = 60.0
CPU = torch.device("cpu")
gloo_only = pytest.mark.gloo_only("there are no channels")


made_here = []


@pytest.fixture(autouse=True)
def _close_all():
    """Close the channels of each test, whose threads end by it."""
    yield
    while made_here:
        made_here.pop().close()
    for thread in threading.enumerate():
        if thread.name == "distman-channels":
            thread.join()


def connected(*numbers, timeout=LIMIT):
    """Return the channels of some processes, all of them in this one."""
    made = {number: Channels(numbers, number, timeout) for number in numbers}
    made_here.extend(made.values())
    for number, channels in made.items():
        for other in numbers:
            if other != number:
                assert channels.open(other, made[other].introduction())
    for number, channels in made.items():
        channels.seal(set(numbers) - {number}, is_complete=True)
    return made


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


def received(channels, rank, tag, like):
    tensor = torch.empty_like(like)
    channels.receive(rank, tag, tensor).wait()
    return tensor


def test_messages_of_one_tag_arrive_in_order_and_those_of_others_whenever_they_are_asked_for():
    one, other = connected(3, 7).values()
    for value in range(5):
        one.send(7, 11, numbers(value)).wait()
        one.send(7, 22, numbers(value, value)).wait()
    one.send(7, 11, numbers(8, 8)).wait()  # of this tag, but of another size
    assert received(other, 3, 11, numbers(0, 0)).tolist() == [8, 8]
    assert [received(other, 3, 22, numbers(0, 0)).tolist() for _ in range(5)] == [[value] * 2 for value in range(5)]
    assert [received(other, 3, 11, numbers(0)).item() for _ in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_messages_are_received_in_the_order_in_which_they_were_asked_for(order):
    one, other = connected(0, 1).values()
    tensors = [numbers(-1) for _ in order]
    works = [other.receive(0, 5, tensor) for tensor in tensors]
    for value in range(3):
        one.send(1, 5, numbers(value)).wait()
    for place in order:
        works[place].wait()
    assert [tensor.item() for tensor in tensors] == [0, 1, 2]


def test_a_message_holds_as_much_as_is_promised_and_more_wait_for_room():
    one, other = connected(0, 1).values()
    sent = [torch.full((one.most_bytes,), value, dtype=torch.uint8) for value in range(9)]
    works = [one.send(1, 1, tensor) for tensor in sent]
    assert [work.is_done for work in works] == [True] * 2 + [False] * 7
    got = []
    reader = threading.Thread(target=lambda: got.extend(received(other, 0, 1, sent[0]) for _ in sent))
    reader.start()
    for work in works:
        work.wait()
    reader.join()
    assert [tensor.unique().tolist() for tensor in got] == [[value] for value in range(9)]


def test_what_is_read_in_time_takes_no_more_memory_than_one_message():
    one, other = connected(0, 1).values()
    for _ in range(300):
        one.send(1, 1, torch.ones(100, dtype=torch.uint8)).wait()
        received(other, 0, 1, torch.empty(100, dtype=torch.uint8))
        assert [start for _, start, _ in one._others[1].places] == [0]


@pytest.mark.parametrize("seed", range(10))
def test_messages_of_any_sizes_through_little_room(seed, monkeypatch):
    """Both processes send at random, in threads, more than there is room for."""
    monkeypatch.setattr(_host_channels, "_MOST_ROOM", 2**10)
    draw = random.Random(seed)  # noqa: S311 - no secret
    ends = connected(0, 1)
    plans = {rank: [(draw.randint(0, 2), draw.randint(1, 512)) for _ in range(300)] for rank in ends}
    errors = []

    def send(rank):
        works = []
        for number, (tag, size) in enumerate(plans[rank]):
            works.append(ends[rank].send(1 - rank, tag, torch.full((size,), number % 251, dtype=torch.uint8)))
            if number % 7 == 0:
                works.pop().wait()
        for work in works:
            work.wait()

    def receive(rank, tag):
        for number, (its_tag, size) in enumerate(plans[1 - rank]):
            if its_tag == tag:
                tensor = received(ends[rank], 1 - rank, tag, torch.empty(size, dtype=torch.uint8))
                assert tensor.unique().tolist() == [number % 251]

    def run(call, *args):
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(send, rank)) for rank in ends]
    threads += [threading.Thread(target=run, args=(receive, rank, tag)) for rank in ends for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_wait_ends_when_either_side_closes_and_what_came_before_is_read():
    one, other = connected(0, 1).values()
    one.send(1, 1, numbers(4)).wait()
    timer = threading.Timer(0.05, one.close)
    timer.start()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0 of the group has left it"):
        received(other, 0, 2, numbers(0))
    assert received(other, 0, 1, numbers(0)).item() == 4
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
        other.send(0, 1, numbers(0))
    for use in (one.send, one.receive):
        with pytest.raises(RuntimeError, match="this rank has given up the group"):
            use(1, 1, numbers(0))
    timer.join()


def test_a_wait_of_another_thread_ends_when_its_own_side_closes():
    one, _ = connected(0, 1).values()
    timer = threading.Timer(0.05, one.close)
    timer.start()
    with pytest.raises(RuntimeError, match="this rank has given up the group"):
        received(one, 1, 1, numbers(0))
    timer.join()


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_wait_has_a_limit_and_says_for_whom(seconds):
    one, _ = connected(0, 1, timeout=seconds).values()
    with pytest.raises(
        RuntimeError, match=f"Connection timed out after {seconds:g} s: rank 1 of the group has not sent what"
    ):
        received(one, 1, 1, numbers(0))
    full = [one.send(1, 1, torch.ones(one.most_bytes, dtype=torch.uint8)) for _ in range(3)]
    with pytest.raises(
        RuntimeError, match=f"Connection timed out after {seconds:g} s: rank 1 of the group has not read what"
    ):
        full[-1].wait()


def test_a_limit_counts_and_a_death_is_seen_while_others_ring_all_the_time():
    one, _, third = connected(0, 1, 2, timeout=0.5).values()
    is_over = threading.Event()

    def ring():
        while not is_over.is_set():
            third.send(0, 9, numbers(1)).wait()
            received(one, 2, 9, numbers(0))

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"Connection timed out after 0\.5 s: rank 1"):
            received(one, 1, 1, numbers(0))
        one._others[1].started += 1  # another process, that is, has this number now
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 of the group has ended"):
            received(one, 1, 1, numbers(0))
    finally:
        is_over.set()
        thread.join()


def test_the_end_of_a_process_is_seen_though_nobody_has_collected_it():
    child = os.fork()
    if child == 0:
        signal.pause()
    started = _host_channels._start_of(child)
    assert started == _host_channels._start_of(child) > 0
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert _host_channels._start_of(child) == -1
    os.waitpid(child, 0)
    assert _host_channels._start_of(child) == -1


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_dead():
    one, other = connected(0, 1).values()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    timer = threading.Timer(0.2, lambda: other.send(0, 1, numbers(5)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        timer.start()
        assert received(one, 1, 1, numbers(0)).item() == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        timer.join()


def test_where_the_start_of_a_process_is_not_known_there_are_no_channels(monkeypatch):
    monkeypatch.setattr(_host_channels, "_start_of", lambda _: 0)
    with pytest.raises(OSError, match="must be readable"):
        Channels((0, 1), 0, LIMIT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_makes_no_sense_closes_the_channels_while_nobody_waits():
    one, other = connected(0, 1).values()
    full = torch.ones(one.most_bytes, dtype=torch.uint8)
    works = [other.send(0, 1, full) for _ in range(3)]  # one waits for room
    other._own[other._others[0].sends + _host_channels._FIRST_SLOT] = -1
    [one.send(1, 2, full) for _ in range(3)]  # so a thread looks what it can make room for
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        works[2].wait()


def test_what_a_process_that_left_has_not_read_is_let_go():
    one, other = connected(0, 1).values()
    works = [one.send(1, 1, torch.ones(one.most_bytes, dtype=torch.uint8)) for _ in range(3)]
    other.close()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        works[2].wait()
    assert not one._others[1].pending
    assert not one._blocked


@pytest.mark.parametrize("number", range(40))
def test_a_signal_at_any_line_of_a_message_makes_none_of_two(number):
    """It may be lost: what ends a call so closes the group."""
    one, other = connected(0, 1).values()
    left = [number]

    def trace(frame, event, _):
        if frame.f_code.co_filename != _host_channels.__file__ or frame.f_code.co_name in ("__enter__", "__exit__"):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise InterruptedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(InterruptedError):
            one.send(1, 1, numbers(7))
            received(other, 0, 1, numbers(0))
    finally:
        sys.settrace(before)
    for end, rank in ((one, 1), (other, 0)):
        end._others[rank].asked.clear()
        with end._lock:  # nobody holds it
            end._go_on()
    one.send(1, 1, numbers(8)).wait()
    got = []
    while 8 not in got:
        got.append(received(other, 0, 1, numbers(0)).item())
    assert got in ([8], [7, 8])


def test_a_limit_that_has_passed_is_a_lost_connection():
    one, _ = connected(0, 1, timeout=0.0).values()
    with pytest.raises(RuntimeError) as caught:
        received(one, 1, 1, numbers(0))
    assert is_lost_connection(caught.value)


@ranks(2)
def test_a_group_that_is_written_in_python_has_none(rank, world_size):
    assert gloo_timeout(type("Own", (dist.ProcessGroup,), {})(rank, world_size)) is None


def test_a_signal_handler_ends_a_wait_by_an_exception():
    def handle(*_):
        raise InterruptedError

    one, other = connected(0, 1).values()
    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(InterruptedError):
            received(one, 1, 1, numbers(0))
    finally:
        signal.signal(signal.SIGUSR1, before)
        timer.join()
    other.send(0, 2, numbers(3)).wait()  # no lock is left
    assert received(one, 1, 2, numbers(0)).item() == 3


def test_a_forked_process_closes_nothing():
    one, other = connected(0, 1).values()
    child = os.fork()
    if child == 0:
        one.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    one.send(1, 1, numbers(1)).wait()
    assert received(other, 0, 1, numbers(0)).item() == 1


def test_a_message_that_cannot_be_is_an_error():
    one, other = connected(0, 1).values()
    one.send(1, 1, numbers(1)).wait()
    one._own[one._others[1].sends + _host_channels._FIRST_SLOT] = 2**40
    with pytest.raises(RuntimeError, match=r"rank 0 of the group must send \d+ bytes at most, got 1099511627776"):
        received(other, 0, 1, numbers(0))


def test_what_is_no_memory_of_channels_is_not_opened(tmp_path):
    one, other = Channels((0, 1), 0, LIMIT), Channels((0, 1, 2), 0, LIMIT)
    true, foreign = one.introduction(), other.introduction()
    with (tmp_path / "file").open("w+b") as file:
        for found in (
            Introduction(),
            true._replace(nonce=true.nonce + 1),
            true._replace(size=true.size - 8),
            true._replace(descriptor=file.fileno()),
            true._replace(descriptor=2**20),
            true._replace(pid=2**22 + 1),
            foreign,
        ):
            assert not one.open(1, found), found
        assert one.open(1, true)


def test_nothing_is_left_open():
    def num_open():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def num_mapped():
        return Path("/proc/self/maps").read_text().count(_host_channels._NAME)

    before = num_open(), num_mapped()
    ends = connected(0, 1, 2)
    ends[0].send(1, 1, numbers(1)).wait()
    assert (num_open(), num_mapped()) == (before[0], before[1] + 9)
    Channels((0, 1), 0, LIMIT).introduction()  # and nobody opens it
    made_here.clear()
    del ends
    assert (num_open(), num_mapped()) == before


class ProcessGroup:
    """Something that can be gone."""


@pytest.mark.parametrize("closes", [True, False])
def test_channels_close_with_their_group_or_before(closes):
    one, other = connected(0, 1).values()
    group = ProcessGroup()
    keep_for(group, one)
    if closes:
        close_those_of(group)
    else:
        del group
    with pytest.raises(RuntimeError, match="rank 0 of the group has left it"):
        received(other, 0, 1, numbers(0))
    close_those_of(ProcessGroup())  # which has none


@pytest.mark.parametrize("num_processes", [2, 8, 16, 96, 5000])
def test_the_room_of_a_host_is_bounded(num_processes):
    channels = Channels(range(num_processes), 1, LIMIT)
    assert channels.most_bytes >= 2**14  # room for what all sums begin with
    assert channels._length <= max(2**24, 2**15 * num_processes) * 1.1


# --- between ranks ---------------------------------------------------------------------------------------------------


def channels_of(name=None):
    agreement = agreement_in(resolve_group(name).process_group)
    return agreement.channels if agreement is not None else None


@gloo_only
@ranks(2, 3, 4)
def test_members_agree_once(world_size):
    assert channels_of() is None
    for _ in range(2):
        assert all_gather_v(torch.ones(1)).tolist() == [1] * world_size
        found = channels_of()
        assert found.is_complete
        assert len(found._others) == world_size - 1


PAIRS = {frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))}
WITHOUT = {  # which ranks do without, and which pairs have no channels
    "ranks 0 and 2 cannot open each other's memory": ((), {frozenset((0, 2))}),
    "rank 1 is told to": ((1,), {frozenset((0, 1)), frozenset((1, 2))}),
    "all are told to": ((0, 1, 2), PAIRS),
}


@gloo_only
@pytest.mark.parametrize("case", WITHOUT)
@ranks(3)
def test_any_pair_may_do_without(monkeypatch, rank, case):
    told, apart = WITHOUT[case]
    monkeypatch.setenv(VARIABLE, "0" if rank in told else "1")
    if not told:
        real_open = Channels.open
        monkeypatch.setattr(Channels, "open", lambda me, it, to: {rank, it} not in apart and real_open(me, it, to))
    for number in range(3):
        sizes = [1 + number, 2, 3]
        gathered = all_gather_v(torch.full((sizes[rank],), float(rank)), sizes)
        assert gathered.tolist() == [float(one) for one in range(3) for _ in range(sizes[one])]
        assert fused_all_reduce([torch.tensor(rank), torch.tensor(2)]) == [3, 6]
        assert all_gather_numbers([rank], resolve_group(None), CPU) == [[0], [1], [2]]
    found = channels_of()
    known = set(found._others) if found is not None else set()
    assert known == {other for pair in PAIRS - apart if rank in pair for other in pair - {rank}}
    assert found is None or not found.is_complete


@gloo_only
@pytest.mark.parametrize("seed", range(5))
@ranks(2, 3, 4)
def test_pieces_of_all_sizes_in_any_mixture(rank, world_size, seed):
    """Below and above what a channel takes, and what goes through a segment, empty ones among them."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    group = resolve_group(None)
    for _ in range(30):
        sizes = [
            [draw.choice([0, 1, 7, 2**10, 2**17, 2**18 - 1, 2**18, 2**18 + 1]) for _ in range(world_size)]
            for _ in range(world_size)
        ]
        sends = [torch.full((sizes[rank][to],), float(10 * rank + to)) for to in range(world_size)]
        receives = [torch.empty(sizes[origin][rank]) for origin in range(world_size)]
        exchange(sends, receives, group)
        for origin, piece in enumerate(receives):
            assert piece.unique().tolist() == ([float(10 * origin + rank)] if len(piece) else [])


@gloo_only
@ranks(2)
def test_one_side_runs_ahead_and_memory_stays_as_it_is(rank):
    """A source of scatters waits for its readers to come, not for what they do then."""
    for number in range(500):
        part = scatter_v(torch.full((2, 50), float(number)) if rank == 0 else torch.empty(2, 50), [1, 1], 0)
        assert part.unique().tolist() == [number]
    found = channels_of()
    assert not any(one.arrived or one.asked or one.pending for one in found._others.values())


@gloo_only
@pytest.mark.parametrize("order", ["as begun", "reversed", "after a blocking one"])
@ranks(2, 3)
def test_more_reductions_under_way_than_have_room_are_told_apart(rank, world_size, order):
    num = 3 * _host_channels._SLOTS
    begun = [fused_all_reduce(torch.tensor([float(number + rank)]), async_op=True) for number in range(num)]
    if order == "after a blocking one":
        assert fused_all_reduce(torch.tensor(1.0)) == world_size
    for _, work in reversed(begun) if order == "reversed" else begun:
        work.wait()
    expected = [float(world_size * number + sum(range(world_size))) for number in range(num)]
    assert [total.item() for total, _ in begun] == expected


@gloo_only
@ranks(2)
def test_what_waits_for_room_goes_on_while_its_sender_waits_elsewhere(rank):
    num = 2 * _host_channels._SLOTS
    begun = [fused_all_reduce(torch.tensor(float(number)), async_op=True) for number in range(num)]
    for _ in range(2):
        if rank == 1:
            for _, work in begun:
                work.wait()
        DistributedManager().barrier()  # rank 0 is there long before
        rank = 1
    assert [total.item() for total, _ in begun] == [2.0 * number for number in range(num)]


@gloo_only
@ranks(2)
def test_a_sum_waits_for_no_reader_that_waits_elsewhere(rank):
    assert fused_all_reduce(torch.tensor(1.0)) == 2.0  # makes the channels
    found = channels_of()
    other = found._others[1 - rank]
    num = 2 * _host_channels._SLOTS
    begun = []
    while rank == 0 and not other.memory[other.receives + _host_channels._BLOCKED]:
        os.sched_yield()
    for number in range(num):
        begun.append(fused_all_reduce(torch.tensor(float(number)), async_op=True))
        while rank == 0 and found._own[other.sends + _host_channels._READ] < found._own[other.sends]:
            os.sched_yield()  # so that this rank never waits for room, and has no reason to read
    for _ in range(2):
        if rank == 1:
            for _, work in begun:
                work.wait()
        DistributedManager().barrier()
        rank = 1
    assert [total.item() for total, _ in begun] == [2.0 * number for number in range(num)]


@gloo_only
@ranks(2)
def test_a_backward_pass_where_not_all_ranks_run_is_refused_at_once():
    value = torch.ones(2, requires_grad=True)
    total = fused_all_reduce(value).sum()
    with pytest.raises(DistmanError, match="the backward pass of a collective must be called where all its ranks run"):
        on_rank(0)(total.backward)()


@ranks(2)
def test_a_first_exchange_in_inference_mode_with_another_default_device(rank):
    shard, term = torch.ones(2 + rank), torch.tensor(float(rank))
    with torch.inference_mode(), torch.device("meta"):
        full, total = all_gather_v(shard), fused_all_reduce({"of this test alone": term})
    assert full.tolist() == [1.0] * 5
    assert total["of this test alone"] == 1
    assert all_gather_v(shard).tolist() == [1.0] * 5


REFUSED = {
    "broadcast_data": lambda: broadcast_data([1]),
    "reduce_loss": lambda: reduce_loss(1.0),
    "fused_all_reduce": lambda: fused_all_reduce(torch.ones(1)),
    "scatter_v": lambda: scatter_v(torch.ones(2), [1, 1]),
}


@gloo_only
@pytest.mark.parametrize("name", REFUSED)
@ranks(2)
def test_a_call_that_is_refused_leaves_the_group_as_it_was(name):
    for _ in range(2):
        with pytest.raises(DistmanError, match="must be called where all its ranks run"):
            on_rank(0)(REFUSED[name])()
        assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@gloo_only
@ranks(2)
def test_unlike_sums_tell_the_ranks_apart_at_once(rank):
    _, work = fused_all_reduce(torch.ones(2 + rank), async_op=True)
    with pytest.raises(PlanMismatchError, match=r"the tensor \[3\] torch\.float32"):
        work.wait()


@gloo_only
@ranks(2)
def test_a_blocking_reduction_on_one_rank_meets_one_under_way_on_the_other(rank):
    if rank == 0:
        total, work = fused_all_reduce(torch.tensor(1.0), async_op=True)
        work.wait()
    else:
        total = fused_all_reduce(torch.tensor(2.0))
    assert total == 3


@gloo_only
@ranks(3, dies=[1], manager=False)
def test_the_death_of_a_rank_ends_the_wait_of_the_others(monkeypatch):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize()
    all_gather_v(torch.ones(1))
    kill_rank(1)
    with pytest.raises(JobFailed, match="rank 1"):
        all_gather_v(torch.ones(1))


@gloo_only
@ranks(3, dies=[1])
def test_a_death_is_seen_where_nobody_watches():
    all_gather_v(torch.ones(1))
    kill_rank(1)
    with pytest.raises(RuntimeError, match="Connection closed"):  # rank 0 may close the group before rank 2 looks
        all_gather_v(torch.ones(1))


@gloo_only
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


@gloo_only
@ranks(2, manager=False)
def test_a_group_has_its_time_limit(rank):
    manager = DistributedManager.initialize(timeout=1)
    manager.create_process_subgroup("pair", 2)
    all_gather_v(torch.ones(1), group="pair")
    if rank == 0:
        with pytest.raises(RuntimeError, match="Connection timed out after 1 s: rank 1 of the group has not sent"):
            all_gather_v(torch.ones(1), group="pair")
    manager.barrier(timeout=LIMIT)


@gloo_only
@ranks(2)
def test_an_interruption_of_the_agreement_closes_the_group(monkeypatch, rank):
    DistributedManager.create_process_subgroup("pair", 2)
    if rank == 0:

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(_local_messages, "_make_channels", interrupt)
            with pytest.raises(KeyboardInterrupt):
                all_gather_v(torch.ones(1), [1, 1], group="pair")
    with pytest.raises(RuntimeError):
        all_gather_v(torch.ones(1), [1, 1], group="pair")


@gloo_only
@ranks(2)
def test_threads_of_a_rank_exchange_in_one_group(rank):
    errors = []

    def run(size):
        with contextlib.suppress(StopIteration):
            for number in range(100):
                gathered = all_gather_v(torch.full((size,), float(number + rank)), [size, size])
                if gathered.tolist() != [float(number)] * size + [float(number + 1)] * size:
                    errors.append(gathered)

    threads = [threading.Thread(target=run, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
