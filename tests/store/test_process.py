"""When the process of a store begins and ends, and that it holds nothing of whoever started it."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distman._base.process_state import reset
from distman._coordination.stop_signals import stop_signals
from distman._store import process
from distman._store.client import Client
from distman._store.connection import StoreLostError
from distman._store.handshake import MEMBER, VISITOR, WATCHER
from distman._store.process import StoreStartError, start_store

from .stores import JOB, KINDS, PATIENCE, SECRET, door, listen, open_store

OPENS_A_STORE = """
import sys, threading
from distman._store.process import listen_on_this_host, start_store
from distman._store.client import Client
from distman._store.dialing import Door
address = chr(0) + sys.argv[1]
process = start_store(listen_on_this_host(address), job="job-1", secret=None, entry_limit=30.0, unreachable_after=30.0)
client = Client(Door(address, "job-1", None, 30.0, 30.0), rank=0)
client.set(b"of rank 0", b"kept")
client.register_will(b"failure", b"news", unless=b"left/0", if_closed=b"0 died", if_unreachable=b"")
print(process.popen.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_with_its_last_member(kind):
    with open_store(kind) as store:
        first, second = store.client(MEMBER, 0), store.client(MEMBER, 1)
        first.close()
        assert second.add(b"counter", 1) == 1
        watcher = store.client(WATCHER, 1)
        second.close()
        assert store.exit_code() == 0
        with pytest.raises(StoreLostError, match=rf"\(pid {store.process.popen.pid}\) is gone"):
            watcher.add(b"counter", 1)


def test_it_ends_where_nobody_comes():
    listener, _ = listen("unix")
    with listener:
        started = start_store(listener, job=JOB, secret=None, entry_limit=0.0, unreachable_after=1.0)
        started.wait_until_up(PATIENCE)
        assert started.popen.wait(PATIENCE) == 0


OPENS_AND_GOES = """
import sys
from distman._store.process import listen_on_this_host, start_store
address = chr(0) + sys.argv[1]
limits = {"entry_limit": 30.0, "unreachable_after": 30.0}
start_store(listen_on_this_host(address), job="job-1", opener=0, **limits).wait_until_up(30.0)
"""


def test_it_waits_for_who_started_it_though_others_have_come_and_gone():
    with open_store("unix", opener=0) as store:
        store.client(MEMBER, 1).close()
        assert store.client(MEMBER, 0).add(b"counter", 1) == 1


def test_it_does_not_wait_for_one_who_has_ended():
    name = f"distman-test/{os.urandom(8).hex()}"
    subprocess.run([sys.executable, "-c", OPENS_AND_GOES, name], check=True, timeout=PATIENCE)
    member = Client(door(f"\0{name}", secret=None), rank=1)
    end = os.pidfd_open(member.store_pid)
    member.close()
    assert select.select([end], [], [], PATIENCE / 2)[0]
    os.close(end)


def test_one_that_nobody_uses_ends_when_it_is_shut():
    with open_store("unix") as store:
        store.client(VISITOR).shut()
        store.close()
        assert store.exit_code() == 0


def test_a_rank_that_is_killed_takes_neither_the_store_nor_its_keys_with_it():
    name = f"distman-test/{os.urandom(8).hex()}"
    opener = subprocess.Popen([sys.executable, "-c", OPENS_A_STORE, name], stdout=subprocess.PIPE, text=True)
    with opener:
        pid = int(opener.stdout.readline())
        other = Client(door(f"\0{name}", secret=None), rank=1)
        opener.kill()
        assert other.get(b"failure", PATIENCE) == b"0 died"
        assert other.get(b"of rank 0", PATIENCE) == b"kept"
        assert other.add(b"news", 0) == 1
        assert other.store_pid == pid
        other.close()


def test_of_a_process_that_dies_the_connection_to_the_store_ends_first():
    with open_store("unix") as store:
        client = store.client()
        later, other = socket.socketpair()
        assert client._first._socket.fileno() > max(later.fileno(), other.fileno())
        later.close()
        other.close()


def test_it_goes_on_whatever_the_terminal_or_the_scheduler_sends_to_all_processes_of_the_job():
    with open_store("unix") as store:
        client = store.client()
        for number in all_stop_signals():
            os.kill(store.process.popen.pid, number)
        assert client.add(b"counter", 1) == 1


def all_stop_signals():
    """All signals that can ask a rank to stop."""
    for number in signal.valid_signals():
        with contextlib.suppress(ValueError, AttributeError):  # one without a name
            yield from stop_signals({"DISTMAN_STOP_SIGNALS": number.name})


def test_it_holds_nothing_of_whoever_started_it(monkeypatch):
    monkeypatch.setenv("DISTMAN_SECRET", SECRET.decode())
    with open(os.devnull) as _mine, open_store("tcp") as store:  # noqa: PTH123 - it must not be inherited
        store.client()
        proc = Path(f"/proc/{store.process.popen.pid}")
        files = [str(entry.readlink()) for entry in (proc / "fd").iterdir()]
        assert sorted(file.partition(":")[0] for file in files) == [
            *["/dev/null"] * 4,
            "anon_inode",
            *["socket"] * 2,
        ]
        assert (proc / "cwd").readlink() == Path("/")
        assert os.getsid(store.process.popen.pid) == store.process.popen.pid
        for secret in (SECRET, SECRET.hex().encode()):
            assert secret not in (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()


def test_it_loads_neither_torch_nor_what_takes_long():
    program = process._PROGRAM.replace("main()", "import json; print(json.dumps(names))")
    program = program.replace("import main", "import main; names = [*sys.modules]")
    command = [sys.executable, *process._options(), "-c", program, str(Path(process.__file__).parent.parent)]
    names = json.loads(subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout)
    own = {name for name in names if name.startswith("distman")}
    parts = {"frames", "handshake", "operations", "server", "table", "transport"}
    table = {"distman._base", "distman._base.timing"}
    assert own == {"distman", "distman._store", *(f"distman._store.{part}" for part in parts)} | table
    assert {"torch", "typing", "os", "socket", "json", "re", "enum", "contextlib", "hashlib"}.isdisjoint(names)


@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/false", "/bin/cat"])
def test_an_interpreter_that_does_not_start_says_so(executable, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable)
    listener, _ = listen("unix")
    with listener, pytest.raises(StoreStartError, match="starting the store's process failed"):
        start_store(listener, job=JOB, secret=None, entry_limit=1.0, unreachable_after=1.0).wait_until_up(PATIENCE)
    process.reap()


def test_a_process_that_is_not_up_in_time_is_an_error_and_does_not_stay(tmp_path, monkeypatch):
    gate, program = tmp_path / "gate", tmp_path / "python"
    os.mkfifo(gate)
    program.write_text(f'#!/bin/sh\ncat {gate} > {os.devnull}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    listener, _ = listen("unix")
    with listener:
        started = start_store(listener, job=JOB, secret=None, entry_limit=PATIENCE, unreachable_after=1.0)
        with pytest.raises(StoreStartError, match="nothing within 0 s"):
            started.wait_until_up(0.0)
        started.end()
        assert started.popen.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.parametrize("noise", ["ERROR: ld.so: object cannot be preloaded: ignored.", "up", "x" * 100_000])
def test_what_others_say_on_standard_error_keeps_no_store_from_its_start(noise, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{noise}' >&2\nexec {sys.executable} \"$@\"\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with open_store("unix") as store:
        assert store.client().add(b"counter", 1) == 1


def test_a_library_that_cannot_be_preloaded_keeps_no_store_from_its_start(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/lib.so")
    with open_store("unix") as store:
        assert store.client().add(b"counter", 1) == 1


def test_the_last_words_of_an_interpreter_that_ends_are_told(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho {'x' * 3000} no more room >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    listener, _ = listen("unix")
    with listener, pytest.raises(StoreStartError, match=r"said: x{400,500} no more room$"):
        start_store(listener, job=JOB, secret=None, entry_limit=1.0, unreachable_after=1.0).wait_until_up(PATIENCE)


def test_the_library_is_found_where_the_program_was_told_to_look(tmp_path, monkeypatch):
    library = Path(os.__file__).parent
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / library.name).symlink_to(library)
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    with open_store("unix") as store:
        assert store.client().add(b"counter", 1) == 1
        variables = Path(f"/proc/{store.process.popen.pid}/environ").read_bytes().split(b"\0")
        assert [one for one in variables if one.startswith(b"PYTHON")] == [b"PYTHONHOME=%b" % bytes(tmp_path)]


def test_a_name_that_is_taken_is_an_error():
    listener, address = listen("unix")
    with listener, pytest.raises(OSError, match="Address already in use"):
        process.listen_on_this_host(address)


def test_reset_closes_every_connection():
    with open_store("unix") as store:
        client = store.client()
        reset()
        with pytest.raises(StoreLostError):
            client.num_keys()
        assert store.exit_code() == 0


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_a_program_that_has_closed_its_outputs_starts_a_store(closed):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for descriptor in closed:
                os.close(descriptor)
            with open_store("unix") as store:
                code = 0 if store.client().add(b"counter", 1) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
