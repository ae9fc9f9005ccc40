"""The watcher's thread, over a store in memory; the other ranks are played by the test."""

import contextlib
import dataclasses
import signal
import threading

import pytest
import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.failure.delivery import Stage
from distman._coordination.failure.record import DIED, LEFT, SILENT, FailureRecord
from distman._coordination.messages import count
from distman._coordination.monitor.context import WatchContext, WatchLimits
from distman._coordination.monitor.hang import StackQueries
from distman._coordination.monitor.watcher import NO_ANSWER, State, Watcher, is_watching
from distman._coordination.wait_scope import failure_behind, raise_if_failed
from distman._store.connection import StoreSilentError
from distman._store.torch_store import TorchStore
from distman._torch_internals import is_lost_connection
from distman.errors import JobFailed

from ...store.stores import MemoryStore, open_store
from ..ranks import at_once, failure_on, leave, places


def make(store, rank=0, num_ranks=2, patience=0.0):
    context = WatchContext(store, "tcp://n1:5", rank, places(num_ranks), opener=1)
    return Watcher(context, WatchLimits(silence=300.0), lambda _: None, patience=patience)


@contextlib.contextmanager
def watching(store, **options):
    watcher = make(store, **options)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.stop()


def run_until_raised(watcher):
    """Let a watcher interrupt the main thread, which may happen before it has begun to wait."""
    try:
        watcher.start()
        threading.Event().wait(60)
    finally:
        watcher.stop()


def tell(store, record):
    record.publish(store)
    count(store, protocol.NEWS, 1)


def test_a_failure_of_another_rank_is_raised_in_the_main_thread():
    store = MemoryStore()
    tell(store, failure_on(1))
    watcher = make(store)
    with pytest.raises(JobFailed, match=r"rank 1 .* raised ValueError: boom"):
        run_until_raised(watcher)
    assert watcher.record == failure_on(1)
    assert not is_watching()


def test_a_failure_of_this_rank_is_raised_where_it_would_wait_for_others_only():
    store = MemoryStore()
    with watching(store) as watcher:
        tell(store, failure_on(0))
        watcher._thread.join(60)
        with pytest.raises(JobFailed, match=r"rank 0 .* raised ValueError: boom"):
            raise_if_failed()
    assert watcher.record == failure_on(0)


def test_an_error_in_another_thread_of_this_rank_is_if_the_program_wants_it():
    store = MemoryStore()
    watcher = make(store)
    watcher.fail(ValueError("boom"))
    with pytest.raises(JobFailed, match=r"rank 0 .* raised ValueError: boom"):
        run_until_raised(watcher)
    assert store.add(protocol.NEWS, 0) == 1


def test_a_wait_that_raises_the_failure_itself_is_enough():
    store = MemoryStore()
    tell(store, failure_on(1))
    watcher = make(store)
    error = failure_on(1).to_failure()
    watcher.note(error)
    with pytest.raises(JobFailed):
        raise error
    watcher.start()
    watcher._thread.join(60)
    assert not watcher._thread.is_alive()
    assert watcher.record == failure_on(1)
    with pytest.raises(JobFailed):
        raise_if_failed()
    watcher.stop()
    raise_if_failed()


def test_that_a_rank_left_too_early_is_raised_again_where_it_is_swallowed():
    watcher = make(MemoryStore())
    error = FailureRecord.left(places(2)[1], "barrier 0").to_failure()
    with contextlib.suppress(JobFailed):
        watcher.note(error)
        raise error
    watcher._interruption._delivery.stage = Stage.RAISED  # as in a program that no test runs
    del error
    with pytest.raises(JobFailed, match="left the job before it came to barrier 0"):
        threading.Event().wait(60)
    watcher.stop()


def test_a_rank_that_ends_since_another_one_left_says_so():
    store, ended = MemoryStore(), []
    context = WatchContext(store, "tcp://n1:5", 0, places(2), opener=0)
    watcher = Watcher(context, WatchLimits(silence=300.0), ended.append, patience=60.0)
    record = FailureRecord.left(places(2)[1], "barrier 0")
    watcher._interruption._abort_job(record.to_failure())
    assert (FailureRecord.read(store), store.add(protocol.NEWS, 0)) == (record, 1)
    (error,) = ended
    assert record.is_told_by(error)


def test_the_first_sign_of_life_is_there_at_once():
    store = MemoryStore()
    with watching(store):
        assert store.check([protocol.beat(0)])
        assert is_watching()


def test_a_rank_that_holds_the_store_may_leave():
    store = MemoryStore()
    with watching(store) as watcher:
        store.set(protocol.CLOSING, "yes")
        store.add(protocol.NEWS, 1)
        watcher._thread.join(60)
        assert watcher.state is State.CLOSED
        assert watcher.explain(RuntimeError("gloo/transport"), "barrier").error_type == LEFT
    assert store.add(protocol.GONE, 0) == 1


class BrokenStore(MemoryStore):
    """A store whose process has gone."""

    def clone(self, *_):
        return self

    def add(self, *_):
        raise dist.DistNetworkError("Broken pipe")

    check = add


def test_a_store_that_is_gone_is_raised_with_the_rank_beside_it():
    watcher = make(BrokenStore())
    with pytest.raises(JobFailed, match=r"rank 1 .* lost the job's store"):
        run_until_raised(watcher)
    assert watcher.record.error_type == DIED


def test_a_store_that_does_not_answer_is_raised_with_the_rank_beside_it():
    class SilentStore(BrokenStore):
        def add(self, *_):
            raise dist.DistNetworkError("no answer") from StoreSilentError("no answer")

    watcher = make(SilentStore())
    with pytest.raises(JobFailed, match=r"got no answer from the job's store at tcp://n1:5 for 300 s"):
        run_until_raised(watcher)
    assert watcher.record.error_type == SILENT


def test_a_rank_that_can_open_nothing_more_watches_over_the_connection_that_it_has():
    class Full(MemoryStore):
        def clone(self, *_):
            raise OSError("Too many open files")

    store = Full()
    with watching(store) as watcher:
        tell(store, failure_on(0))
        watcher._thread.join(60)
        assert watcher.record == failure_on(0)


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_connection_that_a_rank_broke_by_leaving_is_explained():
    store = MemoryStore()
    with watching(store, num_ranks=3):
        assert failure_behind(LOST) is None
        leave(store, 2)
        leave(store, 1)
        record = failure_behind(LOST, "all_gather_v")
        assert failure_behind(ValueError("boom")) is None
        assert failure_behind(failure_on(1, text=str(LOST)).to_failure()) is None
    assert (record.rank, record.error_type) == (2, LEFT), "the first to leave"
    assert failure_behind(LOST) is None


def test_a_connection_that_broke_with_the_store_is_explained():
    (record,) = at_once(lambda: make(BrokenStore()).explain(LOST, "all_gather_v"))
    assert (record.rank, record.error_type) == (1, DIED)


def test_an_error_of_the_store_itself_is_explained():
    error = dist.DistNetworkError("Broken pipe")
    (record,) = at_once(lambda: make(MemoryStore()).explain(error, "all_gather_v"))
    assert (record.rank, record.error_type) == (1, DIED)


def test_a_store_that_answers_is_not_taken_for_gone():
    timed_out = dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0")
    (record,) = at_once(lambda: make(MemoryStore()).explain(timed_out, "a collective"))
    assert record is None


@pytest.mark.parametrize("text", ["Connection timed out", "No route to host", "Network is unreachable"])
def test_a_store_whose_host_does_not_answer_has_not_died(text):
    error = dist.DistNetworkError(text)
    (record,) = at_once(lambda: make(MemoryStore()).explain(error, "all_gather_v"))
    assert (record.rank, record.error_type) == (1, SILENT)
    assert (
        "beside which the job's store runs at tcp://n1:5, is on a host that has not answered for 45 s"
        in record.error_text
    )


def test_who_holds_the_store_learns_last_of_a_failure():
    """Its program may end at once, and take the store with it."""
    store = MemoryStore()
    watcher = make(store, num_ranks=3)
    watcher.context = dataclasses.replace(watcher.context, peers=places(3), holds_store=True)
    tell(store, failure_on(1))
    seen = []

    def another():
        while not store.add(protocol.FAILURE_SEEN, 0):
            pass
        seen.append(watcher._may_act.is_set())
        store.add(protocol.FAILURE_SEEN, 1)

    thread = threading.Thread(target=another)
    thread.start()
    with pytest.raises(JobFailed, match="boom"):
        run_until_raised(watcher)
    thread.join(60)
    assert seen == [False]
    assert watcher._may_act.is_set()


def test_a_look_that_fails_is_reported_and_the_next_one_is_made(caplog):
    class Odd(MemoryStore):
        num_odd = 2

        def add(self, key, value):
            if threading.current_thread().name == "distman-watcher" and self.num_odd:
                self.num_odd -= 1
                raise KeyError("odd")
            return super().add(key, value)

        def clone(self, *_):
            return self

    store = Odd()
    tell(store, failure_on(1))
    with pytest.raises(JobFailed, match="boom"):
        run_until_raised(make(store))
    assert caplog.text.count("KeyError: ") == 2


@pytest.mark.parametrize("error", [LOST, RuntimeError("ncclRemoteError"), dist.DistNetworkError("Broken pipe")])
def test_a_lost_connection_is_known_by_its_error(error):
    assert is_lost_connection(error)
    assert not is_lost_connection(ValueError(str(error)))


@pytest.mark.parametrize(
    "text", ["Connection reset by peer", "Connection closed by server", "Connection timed out", "Broken pipe"]
)
def test_a_connection_of_the_program_is_its_own(text):
    assert not is_lost_connection(RuntimeError(f"upload failed: [Errno 104] {text}"))


def test_an_error_of_nccl_need_not_be_about_a_connection():
    assert not is_lost_connection(dist.DistBackendError("CUDA out of memory"))
    assert is_lost_connection(dist.DistBackendError("ncclRemoteError: a call failed, maybe another process exited"))


def test_ranks_that_answer_are_located():
    store = MemoryStore()
    located = threading.Event()

    def locate():
        try:
            return make(store, num_ranks=3, patience=60.0).locate([2])
        finally:
            located.set()

    def answer():
        queries = StackQueries(store, 2)
        while not located.is_set():
            queries.answer()

    found, _ = at_once(locate, answer)
    assert found[2].startswith("at ")


def test_a_rank_that_does_not_answer_was_last_seen_somewhere():
    store = MemoryStore()
    store.set(protocol.beat(1), "1700000000.0 in barrier at train.py:3")
    (found,) = at_once(lambda: make(store, num_ranks=3).locate([1, 2]))
    assert found == {1: f"{NO_ANSWER}, last seen in barrier at train.py:3", 2: NO_ANSWER}


def test_a_watcher_that_could_not_start_is_stopped_like_any_other():
    before = signal.getsignal(signal.SIGURG)
    with open_store("unix") as opened:
        store = TorchStore(opened.client())
        watcher = make(store)
    with pytest.raises(dist.DistError):
        store.check(["anything"])
    with pytest.raises(dist.DistError):
        watcher.start()
    watcher.stop()
    assert not is_watching()
    assert signal.getsignal(signal.SIGURG) == before


def test_a_rank_is_missed_from_the_moment_that_its_watcher_has_started():
    store = MemoryStore()
    with watching(store):
        assert store.check([protocol.beat(0)])
