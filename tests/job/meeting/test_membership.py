"""Membership over a real store, with a thread for each rank."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import signal
import time

import pytest
import torch.distributed as dist

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import MalformedMessageError
from distman._job.meeting import early_failure, membership, places
from distman._job.meeting.address import bind_listener
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.membership import establish_membership
from distman._job.meeting.places import AtPorts, find_meeting
from distman._job.meeting.secret import Protection, Source
from distman._store.client import Client
from distman._store.handshake import VISITOR, WATCHER
from distman.environments import LaunchEnvironment, detect
from distman.errors import JobFailed, RendezvousError

from ...store.stores import MemoryStore
from .join_records import join_record


@pytest.fixture
def point():
    with bind_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    return AtPorts(f"test-{port}", ("127.0.0.1",), (port,), "the test", is_host=True)


def attend(point, me, timeout=10.0, expected=None):
    with contextlib.closing(enter(point, me, timeout)) as job_store:
        return take_part(job_store, me, timeout, expected)


def enter(point, me, timeout=10.0):
    return point.open(0, timeout) if me.rank == 0 else point.find(me.rank, timeout)


def take_part(job_store, me, timeout=10.0, expected=None):
    return establish_membership(job_store, me, timeout=timeout, source="the test", expected=expected or {})


def gather(point, *join_records, **options):
    """Let all ranks attend at once; return what each got or raised, in the order given."""
    with concurrent.futures.ThreadPoolExecutor(len(join_records)) as pool:
        futures = [pool.submit(attend, point, me, **options) for me in join_records]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_learn_the_same_ranks(point, world_size):
    results = gather(point, *(join_record(rank, world_size) for rank in range(world_size)))
    assert all(result == results[0] for result in results)
    assert [peer.rank for peer in results[0]] == list(range(world_size))


def test_the_store_tells_and_need_not_be_asked_again(point, monkeypatch):
    """Nobody would look again before the test is over."""
    monkeypatch.setattr(timing, "JOIN_SHORTEST_PAUSE", 1e6)
    monkeypatch.setattr(timing, "JOIN_LONGEST_PAUSE", 1e6)
    results = gather(point, *(join_record(rank, 3) for rank in range(3)), timeout=20)
    assert [len(peers) for peers in results] == [3] * 3


def test_the_missing_are_named_on_every_rank_that_came(point):
    started = time.monotonic()
    results = gather(point, join_record(0, 3), join_record(1, 3), timeout=1.0, expected={2: "n2"})
    assert time.monotonic() - started < 4
    for error in results:
        assert isinstance(error, RendezvousError)
        text = str(error)
        assert f"2 of 3 ranks joined tcp://127.0.0.1:{point.ports[0]} within 1 s" in text
        assert "missing: rank 2 (expected on n2)" in text
        assert "Present: 0 (n1, pid 100), 1 (n1, pid 101) [the test]" in text


def test_a_missing_rank_zero_is_named(point):
    (error,) = gather(point, join_record(1, 2), timeout=0.3)
    assert isinstance(error, RendezvousError)
    assert "rank 0 must open the job's store" in str(error)


def test_double_ranks_are_named_on_all(point):
    results = gather(point, join_record(0, 3), join_record(1, 3, pid=7), join_record(1, 3, pid=8, host="n2"))
    for error in results:
        assert isinstance(error, RendezvousError)
        assert "pid 7 on n1" in str(error)
        assert "pid 8 on n2" in str(error)
        assert "Not there yet: rank 2." in str(error)


@pytest.mark.parametrize("seed", range(8))
def test_what_contradicts_is_told_at_once_whoever_else_is_missing(point, seed):
    """Ranks come in any order; one is double or unlike the others, and at least one never comes."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    world_size = draw.randint(4, 9)
    coming = sorted(draw.sample(range(1, world_size), draw.randint(1, world_size - 2)))
    records = [join_record(rank, world_size) for rank in (0, *coming)]
    odd = draw.choice(records)
    field, value = draw.choice([("pid", 7), ("world_size", world_size + 1), ("distman", "0.2.0"), ("torch", "1.0")])
    if field == "pid":
        records.append(dataclasses.replace(odd, pid=value))
    else:
        records[records.index(odd)] = dataclasses.replace(odd, **{field: value})
    draw.shuffle(records)
    with contextlib.ExitStack() as stack:

        def attend_until_all_have(me):
            # A process that has closed its store does not join it again; here all ranks are one process.
            return take_part(stack.enter_context(contextlib.closing(enter(point, me, 60.0))), me, 60.0)

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(records)))
        futures = [pool.submit(attend_until_all_have, me) for me in records]
        while sum(not future.done() for future in futures) > 1:
            time.sleep(0.01)
        while not all(future.done() for future in futures):  # the host stays for those who never come: be them
            with contextlib.suppress(RendezvousError, OSError):
                client = point.find_client(0, 0.1, role=VISITOR)
                client.add(protocol.in_job(protocol.TURNED_AWAY).encode(), 1)
                client.close()
    results = [future.exception() for future in futures]
    told = f"rank {odd.rank} must be one process" if field == "pid" else f"{field} must be the same on all ranks"
    assert all(isinstance(error, RendezvousError) and told in str(error) for error in results), results


def test_a_second_rank_zero_is_named_on_all(point):
    results = gather(point, join_record(0, 2, pid=7), join_record(0, 2, pid=8))
    assert all("rank 0 must be one process, got 2" in str(error) for error in results), results


def test_unlike_world_sizes_are_an_error_on_all(point):
    results = gather(point, join_record(0, 3), join_record(1, 2))
    assert all("world_size must be the same on all ranks" in str(error) for error in results), results


def test_who_opened_the_store_stays_until_all_know_what_is_wrong():
    store = MemoryStore()
    host = JobStore(store.client, "the group's store", 30.0, is_opened_here=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(take_part, host, join_record(0))
        part = dist.PrefixStore(protocol.job(), store)
        place = part.add(protocol.JOINED, 1)
        record = dataclasses.asdict(join_record(1, distman="0.2.0"))
        part.set(protocol.join_record(place), json.dumps(record))
        part.wait([protocol.VERDICT])
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(0.3)
        part.add(protocol.VERDICT_HEARD, 1)
        assert "distman must be the same on all ranks" in str(future.exception())


def test_who_is_interrupted_while_it_parts_is_counted_once_as_one_that_knows():
    store = MemoryStore()
    host = JobStore(store.client, "the store", 30.0)
    part = membership._Membership(host, join_record(1), 10.0, "the test", {})
    with pytest.raises(RendezvousError, match="rank 0 is missing"):
        part.accept(membership._Verdict(error="rank 0 is missing"))
    part.is_over.set()
    part.withdraw(KeyboardInterrupt())
    assert host.store.add(protocol.VERDICT_HEARD, 0) == 1


def join_and_end(job_store, me):
    """Be counted, and end before there is a verdict, or without a look at it."""
    membership._Membership(job_store, me, 60.0, "the test", {}).join_record()
    job_store.close()


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_while_others_are_awaited_is_named_at_once(point, dying):
    records = [join_record(rank, 3) for rank in range(3)]
    stores = [enter(point, record) for record in records]
    join_and_end(stores.pop(dying), records.pop(dying))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(take_part, *both, timeout=60.0) for both in zip(stores, records, strict=True)]
        for future in futures:
            with pytest.raises(JobFailed, match=rf"rank {dying} \(.*\) died: its connection broke"):
                future.result()
    for job_store in stores:
        job_store.close()


@pytest.fixture
def job_of_two(point):
    """A host and a call into its store, after ranks 0 and 1 have met there."""
    host = point.open(0, 10)
    store = host.store

    def call(me):
        return establish_membership(host, me, timeout=10, source="the test", expected={})

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(call, [join_record(0), join_record(1)]))
    yield call, store
    host.close()


def comes_later(rank, seconds):
    return join_record(rank, pid=9, started=1000.0 + seconds)


def test_a_rank_that_comes_after_the_verdict_is_told_who_holds_its_place(job_of_two):
    call, store = job_of_two
    with pytest.raises(RendezvousError, match=r"got pid 9 on n1 .* after .* and pid 101 on n1"):
        call(comes_later(1, 3600))
    assert FailureRecord.read(store) is None


def test_the_end_of_a_rank_that_came_after_the_verdict_harms_nobody(point, job_of_two):
    _, store = job_of_two
    join_and_end(point.find(1, 10), comes_later(1, 0))
    store.again(WATCHER).close()  # it comes after that end
    assert not store.check([protocol.FAILURE])


def test_the_end_of_a_rank_that_gave_up_is_not_told_in_place_of_its_reason(point):
    host = point.open(0, 10)
    with pytest.raises(RendezvousError, match="missing: rank 0"):
        attend(point, join_record(1), timeout=0.1)
    store = host.store
    store.again(WATCHER).close()  # it comes after that end
    assert not store.check([protocol.FAILURE])
    host.close()


def test_a_machine_of_the_same_name_does_not_hold_the_place_of_another(job_of_two):
    call, _ = job_of_two
    with pytest.raises(RendezvousError, match="rank 1 must be one process"):
        call(join_record(1, boot_id="77e0"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_may_be_made_of_two_is_told(job_of_two, rank):
    call, store = job_of_two
    with pytest.raises(RendezvousError, match=f"rank {rank} must be one process"):
        call(comes_later(rank, 1))
    assert f"rank {rank} must be one process" in FailureRecord.read(store).error_text
    assert store.add(protocol.NEWS, 0) == 1


def test_a_second_rank_zero_does_not_change_the_verdict(job_of_two):
    call, store = job_of_two
    before = store.get(protocol.VERDICT)
    with pytest.raises(RendezvousError, match="rank 0 must be one process"):
        call(comes_later(0, 3600))
    assert store.get(protocol.VERDICT) == before


FAILURE = {
    "rank": 2,
    "host": "n2",
    "pid": 5,
    "error_type": "ValueError",
    "error_text": "boom",
    "traceback_text": "Traceback ...\nValueError: boom",
}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (FAILURE, r"rank 2 \(n2, pid 5\) raised ValueError: boom"),
        ({"rank": 2, "what": "boom"}, r"a process that had not joined failed: .* have one release of distman"),
    ],
)
def test_a_rank_that_failed_before_is_told_to_all_at_once(point, failure, message):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(attend, point, join_record(rank, 3), timeout=60.0) for rank in (0, 1)]
        with contextlib.closing(point.find_client(2, 10, role=VISITOR)) as client:
            early_failure._leave(client, json.dumps(failure).encode())
            client.add(protocol.in_job(protocol.TURNED_AWAY).encode(), 1)
        for future in futures:
            with pytest.raises((JobFailed, MalformedMessageError), match=message):
                future.result(timeout=10)


@pytest.mark.parametrize("come", [lambda point: point.open(0, 10), lambda point: point.find(1, 10)])
def test_who_is_told_of_a_failure_by_a_store_that_ends_is_told_of_the_failure(point, come, monkeypatch):
    """And leaves no connection open."""
    clients = []

    class LostAtOnce(Client):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            clients.append(self)

        def add(self, key, amount):
            os.kill(self.store_pid, signal.SIGKILL)
            return super().add(key, amount)

    first, _ = point.start_or_enter(2, 10)
    early_failure._leave(first, json.dumps(FAILURE).encode())
    monkeypatch.setattr(places, "Client", LostAtOnce)
    with (
        contextlib.closing(first),
        pytest.raises(JobFailed, match=r"rank 2 \(n2, pid 5\) raised ValueError: boom"),
    ):
        come(point)
    assert [connection._socket.fileno() for connection in clients[-1]._all] == [-1]


@pytest.mark.parametrize("opener", [0, 1, 2])
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_whoever_fails_before_it_joins_is_told_to_all_whoever_opens_the_store(point, opener, failed):
    """Under Slurm the first task of the first node opens the store, whatever its rank."""

    def come(rank):
        entered = point.open(rank, 10) if rank == opener else point.find(rank, 10)
        with contextlib.closing(entered) as job_store:
            return take_part(job_store, join_record(rank, 3), timeout=60.0)

    def fail():
        record = FailureRecord(**{**FAILURE, "rank": failed})
        environment = LaunchEnvironment("slurm", rank=failed, world_size=3)
        early_failure._leave_at(dataclasses.replace(point, is_host=failed == opener), record, environment, 10)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        others = [pool.submit(come, rank) for rank in range(3) if rank != failed]
        pool.submit(fail).result()
        for future in others:
            with pytest.raises(JobFailed, match=rf"rank {failed} \(n2, pid 5\) raised ValueError: boom"):
                future.result(timeout=20)


def test_who_fails_before_it_joins_is_heard_by_the_ranks_of_another_agent():
    """torchrun does not end them with this one."""
    environ = {
        **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"},
        **{"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": f"{os.getpid()}", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        **{"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "3"},
    }
    environment = detect(environ).environment
    there = find_meeting(environment, environ)

    def come(rank):
        with contextlib.closing(there.open(0, 60.0) if rank == 0 else there.find(rank, 60.0)) as job_store:
            return take_part(job_store, join_record(rank, 3), timeout=60.0)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(come, rank) for rank in range(2)]
        assert early_failure.tell_waiting_ranks(FailureRecord(**FAILURE), environment, environ, 10)
        for other in others:
            with pytest.raises(JobFailed, match=r"rank 2 \(n2, pid 5\) raised ValueError: boom"):
                other.result(timeout=30)


def test_rank_zero_says_who_is_missing_while_it_waits(point, monkeypatch, caplog):
    monkeypatch.setattr(timing, "JOIN_PROGRESS_EVERY", 0.1)
    gather(point, join_record(0, 2), timeout=2.0)
    assert "1 of 2 ranks joined" in caplog.text
    assert "missing: rank 1" in caplog.text


def test_rank_zero_says_who_has_another_secret_while_it_waits(point, monkeypatch, caplog):
    monkeypatch.setattr(timing, "JOIN_PROGRESS_EVERY", 0.1)
    same, other = (
        dataclasses.replace(point, protection=Protection(Source.VARIABLE, character * 32)) for character in (b"a", b"b")
    )
    with contextlib.closing(enter(same, join_record(0, 2))) as job_store:
        with pytest.raises(RendezvousError, match="the job's secret"):
            other.find(1, 0.0)
        with pytest.raises(RendezvousError, match=r"have this job's secret, which 1 of those that came did not prove"):
            take_part(job_store, join_record(0, 2), timeout=0.5)
    assert "see that all started, and have this job's secret, which 1 of those that came did not prove" in caplog.text


def test_a_process_that_joins_with_nonsense_ends_the_start(point):
    garbage = json.dumps({**dataclasses.asdict(join_record(1)), "pid": "1"})
    with contextlib.closing(enter(point, join_record(0))) as job_store:
        store = job_store.store
        store.set(protocol.join_record(store.add(protocol.JOINED, 1)), garbage)
        with pytest.raises(MalformedMessageError, match="came as number 1 failed: pid: it must be int"):
            take_part(job_store, join_record(0))
        assert FailureRecord.read(store).error_type == "MalformedMessageError", "the others are told"
