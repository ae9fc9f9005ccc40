"""Watchers of one host that share their looks into the store, over real memory, on a clock that the test sets."""

import collections
import heapq
import itertools
import json
import os
import random
import threading
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from distman import _host_memory
from distman._coordination import protocol
from distman._coordination.failure.record import SILENT
from distman._coordination.monitor import host_relay, peer_monitor
from distman._coordination.monitor.context import SHORTEST_INTERVAL, WatchContext, WatchLimits, interval
from distman._coordination.monitor.host_relay import HostRelay
from distman._coordination.monitor.peer_connection import PeerConnection
from distman._coordination.monitor.peer_monitor import PeerMonitor, read_sign

from ..ranks import failure_on, places

START = 1000.0  # seconds that the host has been up


class CountingStore(HashStore):
    """Counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def add(self, key, value):
        self.calls[key] += 1
        return super().add(key, value)

    def set(self, key, value):
        self.calls[key] += 1
        super().set(key, value)

    def compare_set(self, key, expected, desired):
        self.calls[key] += 1
        return super().compare_set(key, expected, desired)


class Host:
    """The relays of one host's ranks."""

    def __init__(self, ranks):
        self.now, self.store, self.asked = START, HashStore(), []
        self.relays = {rank: HostRelay(rank, ranks, lambda: self.now) for rank in ranks}

    def join(self, *ranks):
        for rank in ranks or self.relays:
            self.relays[rank].join(self.store)
        return [relay.is_up for relay in self.relays.values()]

    def look(self, rank, longest=1.0):
        def ask():
            self.asked.append(rank)
            return self.store.add(protocol.NEWS, 0)

        return self.relays[rank].count_news(ask, longest)

    def close(self):
        for relay in self.relays.values():
            relay.close()


@pytest.fixture
def make_host():
    made = []

    def make(*ranks):
        made.append(Host(ranks))
        return made[-1]

    yield make
    for host in made:
        host.close()


def test_one_look_serves_all_for_a_while(make_host):
    host = make_host(4, 5, 6)
    assert host.join() == [True] * 3
    host.store.add(protocol.NEWS, 1)
    assert [host.look(rank) for rank in (5, 4, 6)] == [1, 1, 1]
    host.store.add(protocol.NEWS, 1)
    host.now += 0.9
    assert [host.look(rank) for rank in (4, 5, 6)] == [1, 1, 1]
    host.now += 0.2
    assert [host.look(rank) for rank in (6, 4, 5)] == [2, 2, 2]
    assert host.asked == [5, 6]


def test_a_slow_store_is_asked_no_more_often(make_host):
    host = make_host(0, 1, 2)
    host.join()
    host.store.add(protocol.NEWS, 3)
    host.look(1)

    host.now += 2
    host.store.add(protocol.NEWS, 1)
    meanwhile = []

    def ask_slowly():
        host.now += 0.5
        meanwhile.extend([host.look(0), host.look(2)])
        return host.store.add(protocol.NEWS, 0)

    assert host.relays[1].count_news(ask_slowly, 1.0) == 4
    assert (meanwhile, host.asked) == ([3, 3], [1]), "the others go on with what they know"
    assert [host.look(0), host.look(2)] == [4, 4]
    host.now += 2
    host.relays[1].close()
    assert [host.look(0), host.look(2)] == [4, 4]
    assert host.asked == [1, 0], "who has not come back with an answer is not waited for"


def test_a_counter_that_begins_again_is_believed(make_host):
    host = make_host(0, 1, 2)
    host.join()
    host.store.add(protocol.NEWS, 7)
    assert [host.look(rank) for rank in (0, 1)] == [7, 7]
    host.store.set(protocol.NEWS, "1")
    host.now += 2
    assert [host.look(rank) for rank in (2, 0, 1)] == [1, 1, 1]


def test_the_others_go_on_without_the_rank_that_made_the_memory(make_host):
    host = make_host(0, 1, 2)
    host.join()
    host.look(0)
    host.relays[0].close()
    host.now += 2
    assert [host.look(rank) for rank in (1, 2, 0)] == [0, 0, 0]
    assert host.asked == [0, 1, 0], "who has let go of it looks itself"


def test_only_those_who_come_by_are_present(make_host):
    host = make_host(0, 1, 2)
    assert host.relays[1].num_present == 1
    host.join()
    for rank in (0, 1, 2):
        host.look(rank)
    assert host.relays[1].num_present == 3
    host.now += 3
    host.look(1)
    assert host.relays[1].num_present == 1


@pytest.mark.parametrize("seed", range(8))
def test_no_news_is_older_than_what_was_asked_for(make_host, seed):
    draw = random.Random(seed)  # noqa: S311 - it keeps no secrets
    num_ranks, longest = draw.randint(2, 12), draw.choice([0.2, 1.0, 4.0])
    host = make_host(*sorted(draw.sample(range(1000), num_ranks)))
    host.join()
    came = [START]
    for _ in range(2000):
        host.now += draw.expovariate(5 * num_ranks)
        if draw.random() < 0.01:
            host.store.add(protocol.NEWS, 1)
            came.append(host.now)
        number = host.look(draw.choice([*host.relays]), longest)
        late = came[number + 1 :]
        assert not late or host.now - late[0] <= longest
    assert len(host.asked) <= (host.now - START) / longest + 1


def test_a_sign_of_life_is_read_where_it_is_given(make_host):
    host = make_host(0, 1)
    host.join()
    assert not host.relays[1].give_sign(b"1.0 in barrier", 10), "nobody has read it"
    assert host.relays[0].sign_of(1) == "1.0 in barrier"
    host.relays[0].give_sign(b"1.0 ", 10)
    assert host.relays[1].give_sign(b"2.0 ", 10)
    assert (host.relays[0].sign_of(1), host.relays[0].sign_of(7)) == ("2.0 ", ""), "7 is elsewhere"
    assert not host.relays[1].give_sign(b"3.0 ", 10), "0 reads another one now"
    host.relays[0].sign_of(1)
    host.now += 11
    assert not host.relays[1].give_sign(b"4.0 ", 10), "0 has not given a sign itself for too long"


def test_nobody_counts_on_a_rank_that_has_left(make_host):
    host = make_host(0, 1)
    host.join()
    for relay, other in zip(host.relays.values(), (1, 0), strict=True):
        relay.give_sign(b"1.0 ", 10)
        relay.sign_of(other)
    host.relays[0].sign_of(1)
    host.relays[0].leave()
    assert (host.relays[1].sign_of(0), host.relays[1].give_sign(b"2.0 ", 10)) == ("", False)


@pytest.mark.parametrize("sign", [b"", b"x" * 10_000, b"\xff\xfe", "straße".encode() * 100])
def test_any_sign_fits(make_host, sign):
    host = make_host(0, 1)
    host.join()
    host.relays[1].give_sign(sign, 10)
    found = host.relays[0].sign_of(1)
    assert found == sign[: host_relay._MOST_BYTES].decode(errors="replace")
    assert host.look(0) == 0, "it writes to no other place"


def test_a_host_without_memory_is_nothing_to_warn_of(make_host, caplog):
    host = make_host(0, 1)
    host.store.set(protocol.host_relay(0), "")
    assert host.join(1) == [False, False]
    assert caplog.records == []


class LostStore(HashStore):
    """Takes nothing any more."""

    def set(self, *_):
        raise DistNetworkError("lost")


def test_memory_that_nobody_was_told_of_is_let_go():
    before = sorted(Path("/proc/self/fd").iterdir())
    host = Host((0, 1))
    host.store = LostStore()
    with pytest.raises(DistNetworkError):
        host.join(0)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("found", ["", "nonsense", "[1]", "[1, 2, 3]", "[{here}, 0, 5]"])
def test_who_finds_no_memory_looks_itself(make_host, found):
    host = make_host(0, 1)
    host.store.set(protocol.host_relay(0), found.format(here=os.getpid()))
    assert host.join(1) == [False, False]
    assert [host.look(1), host.look(1)] == [0, 0]
    assert host.asked == [1, 1]


def test_memory_of_another_job_is_left_alone(make_host):
    host, other = make_host(0, 1), make_host(0, 1)
    other.join(0)
    pid, descriptor, nonce = json.loads(other.store.get(protocol.host_relay(0)))
    host.store.set(protocol.host_relay(0), json.dumps([pid, descriptor, nonce + 1]))
    assert host.join(1) == [False, False]


@pytest.mark.parametrize("function", ["make_memory", "opened_memory"])
def test_where_memory_is_refused_each_looks_itself(make_host, monkeypatch, function):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_relay, function, refuse)
    host = make_host(0, 1)
    host.join()
    host.join()
    assert not host.relays[1].is_up
    assert [host.look(1), host.look(1)] == [0, 0]


def test_nobody_asks_for_ever_where_the_memory_is(make_host):
    host = make_host(0, 1)
    host.store = CountingStore()
    for _ in range(100):
        host.join(1)
    assert host.store.calls[protocol.host_relay(0)] == host_relay._MOST_TRIES


def test_a_rank_alone_on_its_host_needs_no_memory(make_host):
    host = make_host(3)
    assert host.join() == [False]
    assert not host.store.check([protocol.host_relay(3)])


def test_nothing_stays_open():
    before = sorted(Path("/proc/self/fd").iterdir())
    host = Host((0, 1))
    host.join()
    host.close()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_system_without_such_memory(make_host, monkeypatch):
    monkeypatch.setattr(host_relay, "CAN_BE_MADE", False)
    assert _host_memory.CAN_BE_MADE
    assert make_host(0, 1).join() == [False, False]


class Simulation:
    """Threads that take turns on one clock: who waits, waits until all others do, and time goes on to the next end."""

    def __init__(self, seconds):
        self.now, self._until = START, START + seconds
        self._queue, self._numbers = [], itertools.count()

    @property
    def is_over(self):
        return self.now >= self._until

    def wait(self, seconds):
        turn = threading.Event()
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), turn))
        self._next()
        turn.wait()

    def run(self, *works):
        """Run each work in a thread, from its own moment on."""

        all_wait = threading.Barrier(len(works) + 1)

        def begin(seconds, work, turn):
            heapq.heappush(self._queue, (START + seconds, next(self._numbers), turn))
            all_wait.wait()
            turn.wait()
            work()
            self._next()

        threads = []
        for number, work in enumerate(works):
            turn = threading.Event()
            threads.append(threading.Thread(target=begin, args=(0.07 * number, work, turn)))
            threads[-1].start()
        all_wait.wait()
        self._next()
        for thread in threads:
            thread.join()

    def _next(self):
        if self._queue:
            self.now, _, turn = heapq.heappop(self._queue)
            turn.set()


class Watchers:
    """The monitors of a host's ranks in a large job."""

    def __init__(self, monkeypatch, num_ranks, world_size, seconds, silence=300.0):
        self.simulation, self.store = Simulation(seconds), CountingStore()
        self.found, self.stopped = {}, set()
        monkeypatch.setattr(PeerConnection, "wait", lambda _, seconds: self.simulation.wait(seconds))
        peers, limits = places(world_size), WatchLimits(silence)
        self.monitors = [
            PeerMonitor(
                self.store,
                WatchContext(
                    self.store, "tcp://n1:5", None, rank, peers, is_one_host=False, neighbours=range(num_ranks)
                ),
                limits,
                None,
                threading.Event(),
                clock=lambda: self.simulation.now,
            )
            for rank in range(num_ranks)
        ]

    def run(self, *others):
        """Let all watch until the time is over or they have found something."""

        def watch(rank):
            while not self.simulation.is_over and rank not in self.stopped:
                record = self.monitors[rank].look()
                if record is not None:
                    self.found[rank] = self.simulation.now, record
                    return

        try:
            self.simulation.run(*[lambda rank=rank: watch(rank) for rank in range(len(self.monitors))], *others)
        finally:
            for monitor in self.monitors:
                monitor.close()


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_a_large_job_asks_its_store_once_per_host(monkeypatch, num_ranks):
    world_size, minutes = 100_000, 4
    watchers = Watchers(monkeypatch, num_ranks, world_size, 60 * minutes)
    watchers.run()
    every = max(interval(world_size // num_ranks), SHORTEST_INTERVAL)
    assert watchers.store.calls[protocol.NEWS] <= 60 * minutes / every + num_ranks
    beats = 60 * minutes / (5 * interval(world_size))
    first, last = watchers.store.calls[protocol.beat(0)], watchers.store.calls[protocol.beat(num_ranks)]
    assert (first, last) == (pytest.approx(beats, abs=2), pytest.approx(beats, abs=2)), "other hosts watch, and are"
    assert all(watchers.store.calls[protocol.beat(rank)] <= 3 for rank in range(1, num_ranks)), "those of this host"
    places = [read_sign(watchers.store, rank).partition(" ")[2] for rank in range(1, num_ranks)]
    assert places == [""] * (num_ranks - 1), "the store does not go on saying where they were at the start"


@pytest.mark.parametrize("world_size", [600, 5_000, 100_000])
def test_a_failure_is_known_to_the_whole_host_in_time(monkeypatch, world_size):
    watchers = Watchers(monkeypatch, 8, world_size, 60)

    def fail():
        watchers.simulation.wait(20)
        failure_on(700).publish(watchers.store)
        watchers.store.add(protocol.NEWS, 1)

    watchers.run(fail)
    longest = interval(-(-world_size // 8)) + 2 * SHORTEST_INTERVAL
    assert all(record == failure_on(700) for _, record in watchers.found.values())
    assert [rank for rank, (when, _) in watchers.found.items() if when - START - 20.56 > longest] == []
    assert len(watchers.found) == 8
    assert not any(read_sign(watchers.store, rank) for rank in range(8)), "so they are told from those that do not know"
    assert watchers.store.add(protocol.FAILURE_SEEN, 0) == 8


def test_a_rank_that_stands_still_is_missed_on_its_host_and_the_store_says_where_it_was(monkeypatch):
    watchers, sign = Watchers(monkeypatch, 4, 5_000, 200, silence=60.0), "in barrier at a.py:3"
    monkeypatch.setattr(peer_monitor, "_sign_of_life", lambda: f"{watchers.simulation.now} {sign}".encode())

    def stop():
        watchers.simulation.wait(100)
        watchers.stopped.add(2)

    watchers.run(stop)
    record = watchers.found[1][1]
    assert (record.rank, record.error_type) == (2, SILENT)
    assert sign in record.error_text
    assert {rank: one for rank, (_, one) in watchers.found.items()} == {0: record, 1: record, 3: record}
    assert 60 <= watchers.found[1][0] - START - 100 <= 60 + 3 * 5 * interval(5_000)
    assert 90 < float(read_sign(watchers.store, 2).split()[0]) - START <= 100 + 1
