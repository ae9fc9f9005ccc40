"""Those who pose as a store behind a credential of munge, as another user makes one, or as he has recorded it."""

import os
import subprocess

import pytest

from distman._job.meeting import munge
from distman._job.meeting.address import bind_listener
from distman._job.meeting.places import AtPorts
from distman._job.meeting.secret import Protection, Source
from distman._store.client import Client
from distman._store.dialing import ForeignServiceError
from distman._store.handshake import VISITOR
from distman._store.process import start_store

from ...job.meeting.munged import munge_daemon
from ..conftest import require_namespaces, require_programs
from .attacking import AS_ANOTHER_USER, LIMIT, NOBODY, TRIES

DAY = 86_400.0
FEW = TRIES // 10  # of each credential
NOT_OURS = f"made by this user, uid 0, got one of uid {NOBODY}"
UNREAD = "one that munge made for uid 0, got one of which it says"
UNKNOWN = "does not know this job, or the job's secret"


@pytest.fixture(scope="module")
def munged():
    require_programs("munged", "setpriv", "munge")
    require_namespaces()
    with munge_daemon() as daemon:
        yield daemon


def made_by_another(munged, payload, *options):
    """What munge really makes for another user."""
    program = [*AS_ANOTHER_USER, "munge", f"--socket={munged.socket}", *options]
    return subprocess.run(program, input=payload, capture_output=True, timeout=LIMIT, check=True).stdout.strip()


@pytest.fixture
def point(munged):
    protection = Protection(Source.MUNGE, socket=munged.socket)
    return AtPorts("attacked", ("127.0.0.1",), (), "the test", is_host=True, protection=protection)


def credentials(munged, point, recorded):
    """Credentials, and what is said of each."""
    payload = b"distman door 1\0" + point.job_id.encode() + b"\0" + b"k" * 32
    return {
        "of another user": (made_by_another(munged, payload, "--restrict-uid=0"), NOT_OURS),
        "of another user, for all": (made_by_another(munged, payload), NOT_OURS),
        "expired, of another user": (munged.forge(payload, uid=int(NOBODY), to=0, age=DAY), NOT_OURS),
        "made for another user": (made_by_another(munged, payload, f"--restrict-uid={NOBODY}"), UNREAD),
        "made for another service": (munge.seal(b"a service of this user's", munged.socket), "for something else"),
        "made for another job": (munge.seal(payload.replace(b"attacked", b"other"), munged.socket), "something else"),
        "replayed": (recorded, UNKNOWN),
        "replayed, expired": (munged.forge(payload, uid=0, to=0, age=DAY), UNKNOWN),
        "replayed, made in the future": (munged.forge(payload, uid=0, to=0, age=-DAY), UNKNOWN),
        "none": (b"", "sends no credential of munge"),
        "garbage": (b"MUNGE:\x1b[2J:", UNREAD),
    }


def test_a_poser_is_not_taken_for_the_store(munged, point, scene):
    member, _ = point.start_or_enter(0, LIMIT)
    recorded = munge.seal(b"distman door 1\0" + point.job_id.encode() + b"\0" + member.door.secret, munged.socket)
    posers = credentials(munged, point, recorded)
    listed = [credential.decode() for credential, _ in posers.values()]
    with scene.squatter([], ports=[0] * len(posers), credentials=listed, job="attacked") as squatted:
        for port, (_, reason) in zip(squatted["ports"], posers.values(), strict=True):
            said = {refusal(port, point) for _ in range(FEW)}
            assert len(said) == 1
            assert reason in said.pop()
        Client(point.door_at(member.door.address), VISITOR).close()  # whose clocks do not matter
        member.close()
    assert squatted["guests"] == FEW * len(posers)
    assert squatted["secrets"] == 0


@pytest.mark.parametrize("age", [DAY, -DAY], ids=["behind", "ahead"])
def test_clocks_that_disagree_keep_no_rank_out(munged, point, age):
    key = os.urandom(32)
    credential = munged.forge(b"distman door 1\0" + point.job_id.encode() + b"\0" + key, uid=0, to=0, age=age)
    listener = bind_listener("127.0.0.1", 0)
    address = listener.getsockname()
    settings = {"entry_limit": LIMIT, "unreachable_after": LIMIT}
    process = start_store(listener, job=point.door_at(address).job, secret=key, credential=credential, **settings)
    process.wait_until_up(LIMIT)
    Client(point.door_at(address)).close()
    assert process.popen.wait(LIMIT) == 0


def refusal(port, point):
    with pytest.raises(ForeignServiceError) as caught:
        Client(point.door_at(("127.0.0.1", port)), VISITOR)
    return str(caught.value)
