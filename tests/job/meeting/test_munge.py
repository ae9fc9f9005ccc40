"""munge against a daemon of our own: what a credential proves, and what is said of one that proves nothing."""

import os
import subprocess

import pytest

from distman._job.meeting import munge
from distman._job.meeting.munge import CredentialError, DaemonError

from ...launch.conftest import require_programs
from .munged import munge_daemon

ME = os.geteuid()
OTHER = ME + 1
DAY = 86_400.0


@pytest.fixture(scope="module")
def munged():
    require_programs("munged", "setpriv")
    with munge_daemon() as daemon:
        yield daemon


@pytest.mark.parametrize("size", [0, 60, 5000])
def test_what_is_sealed_can_be_read_by_every_process_of_the_user(munged, size):
    payload = os.urandom(size)
    credential = munge.seal(payload, munged.socket)
    assert payload not in credential or not payload
    assert [munge.unseal(credential, munged.socket) for _ in range(3)] == [payload] * 3, "the second is a replay"


@pytest.mark.parametrize("age", [0, DAY, -DAY], ids=["now", "expired", "made in the future"])
def test_clocks_need_not_agree(munged, age):
    assert munge.unseal(munged.forge(b"text", uid=ME, to=ME, age=age), munged.socket) == b"text"


@pytest.mark.parametrize("age", [0, DAY, -DAY], ids=["now", "expired", "made in the future"])
def test_what_another_user_made_proves_nothing(munged, age):
    with pytest.raises(CredentialError, match=rf"made by this user, uid {ME}, got one of uid {OTHER}\. See which"):
        munge.unseal(munged.forge(b"text", uid=OTHER, to=ME, age=age), munged.socket)


@pytest.mark.parametrize("age", [0, DAY, -DAY], ids=["now", "expired", "made in the future"])
def test_what_was_made_for_another_user_cannot_be_read(munged, age):
    with pytest.raises(CredentialError, match=f"Unauthorized credential for client UID={ME}"):
        munge.unseal(munged.forge(b"text", uid=ME, to=OTHER, age=age), munged.socket)


def test_another_user_of_the_host_cannot_read_it(munged):
    if ME != 0:
        pytest.skip("to become another user needs root")
    credential = munge.seal(b"text", munged.socket)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "unmunge", f"--socket={munged.socket}"]
    finished = subprocess.run(command, input=credential, capture_output=True, timeout=30, check=False)
    assert b"Unauthorized credential for client UID=65534" in finished.stderr
    assert b"text" not in finished.stdout


def spoilt(credential):
    """Return credentials that munge did not make, from one that it made."""
    middle = len(credential) // 2
    changed = bytes([credential[middle] ^ 1])
    return {
        "empty": b"",
        "garbage": b"garbage",
        "binary": b"\xff\xfe\0\1" * 50,
        "short": credential[:middle],
        "without its end": credential[:-5] + b":",
        "changed": credential[:middle] + changed + credential[middle + 1 :],
        "huge": b"MUNGE:" + b"A" * 1_000_000 + b":",
        "nothing in it": b"MUNGE::",
    }


@pytest.mark.parametrize("kind", spoilt(b"MUNGE:0123456789:"))
def test_garbage_is_one_sentence(munged, kind):
    with pytest.raises(CredentialError, match=f"must be one that munge made for uid {ME}, got") as caught:
        munge.unseal(spoilt(munge.seal(b"text", munged.socket))[kind], munged.socket)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_daemon_that_is_gone_is_told_with_its_host_and_socket():
    require_programs("munged", "setpriv")
    with munge_daemon() as daemon:
        credential = munge.seal(b"text", daemon.socket)
        daemon.process.terminate()  # killed, it would leave its socket, which libmunge tries for 2 s
        daemon.process.wait()
        for ask in (lambda: munge.seal(b"text", daemon.socket), lambda: munge.unseal(credential, daemon.socket)):
            with pytest.raises(DaemonError, match=f"by munge failed on {os.uname().nodename}: .*") as caught:
                ask()
            assert f"[socket {daemon.socket}]. See that munged runs there" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "AuthInfo=socket={}",
        "authinfo = cred_expire=5,socket={},ttl=60  # ours",
        "AuthType=auth/munge AuthInfo=socket={}",
        "#AuthInfo=socket=/elsewhere\nAuthInfo=socket={}",
    ],
)
def test_the_socket_stands_in_slurms_configuration(munged, tmp_path, line):
    file = tmp_path / "slurm.conf"
    file.write_text(f"ClusterName=x\n{line.format(munged.socket)}\nMpiDefault=none\n")
    assert munge.find_socket({"SLURM_CONF": str(file)}) == munged.socket


def test_a_socket_that_is_not_there_is_none(tmp_path):
    file = tmp_path / "slurm.conf"
    file.write_text(f"AuthInfo=socket={tmp_path}/socket\n")
    assert munge.find_socket({"SLURM_CONF": str(file)}) is None


def test_without_the_programs_there_is_no_socket(munged, tmp_path, monkeypatch):
    file = tmp_path / "slurm.conf"
    file.write_text(f"AuthInfo=socket={munged.socket}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert munge.find_socket({"SLURM_CONF": str(file)}) is None
