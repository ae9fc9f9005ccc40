"""The store of one's own job is found, among what other programs and other users have put in the way."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distman._base import timing
from distman._coordination import protocol
from distman._job.meeting import job_store, places
from distman._job.meeting.address import bind_listener
from distman._job.meeting.places import AtPorts, OnThisHost
from distman._job.meeting.secret import Protection, Source
from distman._store.process import StoreProcess
from distman.errors import RendezvousError

from ...launch.conftest import require_programs
from ...ports import find_free_port

NOBODY = 65534
LIMIT = 60


@pytest.fixture
def silent_port():
    with bind_listener("127.0.0.1", 0) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def free_port():
    return find_free_port()


def at_ports(*ports):
    return AtPorts("job-1", ("127.0.0.1",), ports, "the test", is_host=True)


def on_this_host():
    return OnThisHost(f"job-{os.urandom(8).hex()}", ("127.0.0.1",), (4000,), "the test", is_host=True)


@pytest.fixture(params=["unix", "tcp"])
def point(request, free_port):
    return at_ports(free_port) if request.param == "tcp" else on_this_host()


def opened(point, **options):
    client, is_own = point.start_or_enter(0, 10, **options)
    assert is_own
    return contextlib.closing(client)


def in_the_way(point):
    """Return what one look at the endpoint finds there instead of the job's store, however long the answers take."""
    client, reasons, others = point.try_all(1, LIMIT)
    assert client is None
    assert others == reasons
    return [*reasons.values()]


def test_the_store_of_the_job_is_found(point):
    with opened(point) as host, contextlib.closing(point.find_client(1, 10)) as client:
        host.set(b"key", b"value")
        assert client.get(b"key", 10) == b"value"
        assert client.session == host.session


def test_nobody_meets_by_a_secret_where_the_kernel_knows_no_users():
    """In a namespace without users the kernel gives the same number to all."""
    require_programs("unshare")
    subprocess.run(["unshare", "--user", sys.executable, "-c", MEETS, os.urandom(8).hex()], check=True, timeout=60)


MEETS = """
import sys
from distman._job.meeting.places import find_meeting
from distman._job.meeting.secret import find_protection
from distman.environments import detect
environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "DISTMAN_JOB_ID": sys.argv[1]}
environ["DISTMAN_SECRET"] = "s" * 32
environment = detect(environ).environment
protection = find_protection(environment, environ)
point = find_meeting(environment, environ, protection)
host, is_own = point.start_or_enter(0, 30)
assert is_own and point.find_client(1, 30).session == host.session
"""


def test_a_store_is_found_by_a_user_of_another_number_who_has_the_secret(free_port, monkeypatch):
    point = dataclasses.replace(at_ports(free_port), protection=Protection(Source.VARIABLE, b"s" * 32))
    with opened(point) as host:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        with contextlib.closing(point.find_client(1, 10)) as client:
            assert client.session == host.session


def test_a_second_process_that_would_open_it_enters_it(point):
    with opened(point) as host:
        other, is_own = point.start_or_enter(0, 10)
        with contextlib.closing(other):
            assert not is_own
            assert other.session == host.session


@pytest.mark.parametrize("_", range(5))
def test_processes_that_open_it_at_the_same_moment_meet(_):
    point, clients = on_this_host(), []

    def open_it():
        clients.append(point.start_or_enter(0, 10)[0])

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(contextlib.closing(point.find_client(1, 10)))
        for client in clients:
            stack.enter_context(contextlib.closing(client))
        assert {client.session for client in clients} == {found.session}


def test_a_store_that_is_opened_late_is_found(point):
    hosts = []
    timer = threading.Timer(0.2, lambda: hosts.append(point.start_or_enter(0, 10)[0]))
    timer.start()
    client = point.find_client(1, 20)
    timer.join()
    assert client.session == hosts[0].session
    client.close()
    hosts[0].close()


def test_the_store_of_an_earlier_start_is_not_taken_for_the_new_one(point, monkeypatch):
    with opened(point) as host:
        monkeypatch.setattr(job_store, "_left", {host.session})
        assert in_the_way(point) == ["the store of an earlier start is still open"]


def test_the_store_of_an_earlier_start_is_named_though_it_answers_no_more_in_the_end(monkeypatch):
    monkeypatch.setattr(timing, "FIND_QUIET", -1.0)
    point = on_this_host()
    with opened(point) as host:
        monkeypatch.setattr(job_store, "_left", {host.session})
        monkeypatch.setattr(places.logger, "warning", lambda *_: os.kill(host.store_pid, signal.SIGSTOP))
        try:
            with pytest.raises(RendezvousError, match=r"Tried .*: the store of an earlier start is still open"):
                point.find_client(1, 3.0)
        finally:
            os.kill(host.store_pid, signal.SIGCONT)


@pytest.mark.parametrize("key", [protocol.LEFT, protocol.FAILURE])
def test_a_job_of_which_a_rank_goes_on_leaves_its_place_to_the_next_start(point, key, monkeypatch):
    """A rank that saves something, or is stopped, keeps the store of a job that is over."""
    monkeypatch.setattr(timing, "OPEN_ENDING", 0.1)
    with opened(point) as lingering:
        lingering.add(protocol.in_job(protocol.STARTED).encode(), 2)
        lingering.set(protocol.in_job(key).encode(), b"1")
        assert in_the_way(point) == ["the store of an earlier start is still open"]
        with opened(point) as host, contextlib.closing(point.find_client(1, 10)) as client:
            assert client.session == host.session != lingering.session
            assert lingering.add(b"counter", 1) == 1


def test_a_failure_before_the_start_is_heard_by_those_who_come_later(point):
    with opened(point) as host:
        host.set(protocol.in_job(protocol.FAILURE).encode(), b"1")
        with contextlib.closing(point.find_client(1, 10)) as client:
            assert client.session == host.session


def test_the_store_of_another_job_is_not_taken_for_this_one(free_port):
    point = at_ports(free_port)
    with opened(point):
        (found,) = in_the_way(dataclasses.replace(point, job_id="job-2"))
    assert found.startswith("another program listens there")


def test_foreign_services_before_the_store_are_passed_by(silent_port, free_port):
    with opened(at_ports(free_port)) as host:
        client = at_ports(silent_port, free_port).find_client(1, 20)
        assert client.session == host.session
        client.close()


def test_a_port_that_is_taken_is_passed_by(silent_port, free_port):
    with opened(at_ports(silent_port, free_port)) as host:
        assert host.door.address == ("127.0.0.1", free_port)


def test_a_port_whose_service_sends_everybody_away_is_taken(monkeypatch):
    monkeypatch.setattr(timing, "OPEN_ENDING", 0.1)
    with bind_listener("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as threads:

        def send_away():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threads.submit(send_away)
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"no port is free on this host: {port} "):
            at_ports(port).start_or_enter(0, 300)
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("port_or_name", ["port", "name"])
def test_a_store_that_is_gone_when_it_has_just_started_is_told(port_or_name, free_port, monkeypatch):
    point = at_ports(free_port) if port_or_name == "port" else on_this_host()
    monkeypatch.setattr(StoreProcess, "wait_until_up", lambda self, _: self.end())
    with pytest.raises(RendezvousError, match=r"rank 0 must reach the store of the job, .* \[the test\]\. See whether"):
        point.start_or_enter(0, 10)


def test_what_fails_while_the_store_starts_ends_it_and_leaves_its_place(point):
    def fail():
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            point.start_or_enter(0, 10, meanwhile=fail)
    with opened(point):
        pass


def test_who_holds_up_the_first_look_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(timing, "OPEN_LOOK", 0.1)
    point = on_this_host()
    with socket.socket(socket.AF_UNIX) as turn:
        turn.bind(f"{point.prefix}turn")
        with opened(point):
            pass
    (record,) = caplog.records
    assert f"holds @{point.prefix[1:]}turn" in record.getMessage()


def test_what_others_listen_at_is_passed_by_and_named(monkeypatch, caplog):
    """Somebody else's process may take names that begin like this job's: the kernel says whose it is."""
    monkeypatch.setattr(timing, "FIND_QUIET", 0.0)
    point = on_this_host()
    listeners = [occupy(point) for _ in range(3)]
    with pytest.raises(RendezvousError, match="a program of another user listens there"):
        point.find_client(1, 0.1)
    (record,) = caplog.records
    assert "waiting for rank 0 at unix:@distman/" in record.getMessage()
    with opened(point) as host, contextlib.closing(point.find_client(1, 20)) as client:
        assert client.session == host.session
    for listener in listeners:
        listener.close()


def occupy(point, *, name="", backlog=64):
    """A socket that another user has listen at a name of this job."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name or point.new_name())
    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        listener.listen(backlog)  # the kernel notes who does this
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return listener


def test_names_of_others_where_nobody_gets_his_turn_hold_up_nobody(monkeypatch):
    """All of them together may cost the patience for one: it is long here, and nobody waits it out in vain."""
    monkeypatch.setattr(timing, "DIAL", 300.0)
    monkeypatch.setattr(timing, "OPEN_LOOK", 0.2)  # here all is in vain
    point = on_this_host()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            listener = stack.enter_context(occupy(point, backlog=0))
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(listener.getsockname())
        _, reasons, others = point.try_all(1, 0.2)
        assert set(reasons.values()) == {"it has too many visitors"}
        assert others == reasons
        with opened(point) as host, contextlib.closing(point.find_client(1, 600)) as client:
            assert client.session == host.session


def test_the_names_of_others_move_no_cursor_and_fill_no_screen():
    point = on_this_host()
    with contextlib.ExitStack() as stack:
        for number in range(12):
            name = f"{point.prefix}{number}\x1b[2J"
            stack.enter_context(occupy(point, name=name))
        with pytest.raises(RendezvousError) as caught:
            point.find_client(1, 0.1)
    text = str(caught.value)
    assert text.isprintable()
    assert "\\x1b[2J" in text
    assert " and 4 more." in text


def test_where_the_system_hides_the_names_there_is_one(monkeypatch):
    monkeypatch.setattr(places, "_names", lambda: None)
    point = on_this_host()
    assert point.places() == [point.new_name()]
    with opened(point) as host, contextlib.closing(point.find_client(1, 10)) as client:
        assert client.session == host.session


def test_nobody_there_says_what_was_tried_and_where_it_came_from(silent_port):
    with pytest.raises(RendezvousError) as caught:
        at_ports(silent_port, 1).find_client(1, 0.1)
    text = str(caught.value)
    assert "rank 0 must open the job's store" in text
    assert f"127.0.0.1:{silent_port}: timed out" in text
    assert "127.0.0.1:1: Connection refused" in text
    assert "[the test]" in text


def test_what_was_in_the_way_before_the_last_try_is_named_too():
    def answer_once_and_end():
        with listener, listener.accept()[0] as visitor:
            visitor.sendall(bytes(200))

    listener = bind_listener("127.0.0.1", 0)
    point = at_ports(listener.getsockname()[1])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(answer_once_and_end)
        with pytest.raises(RendezvousError) as caught:
            point.find_client(1, 2)
        ended.result()
    assert ": another program listens there: " in str(caught.value)


def test_the_place_is_free_when_all_have_left(point):
    for _ in range(3):
        with opened(point):
            pass
