"""Attackers and squatters of another user, in any network namespace, and the jobs that they attack."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import encode

from ..preloaded import PYTHON
from ..processes import poll

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "distman"
JOB = HERE / "job.py"
NOBODY = "65534"
TRIES = 1_000
LIMIT = 120.0
AS_ANOTHER_USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
IS_MARKED = "pickled"

KEYS = {
    "verdict": protocol.VERDICT,
    "peer address": protocol.peer_address(1),
    "queries": protocol.queries(1),
    "failure": protocol.FAILURE,
    "early failure": protocol.EARLY_FAILURE,
    "news": protocol.NEWS,
    "stop": protocol.STOP,
    "query": protocol.queries(0),
    "closing": protocol.CLOSING,
}
NOTICE = encode(FailureRecord(1, "n1", 1, "ValueError", "forged \x1b[2J"))
NOTHING_RECORDED = {"opening": "00" * 24, "proof": "00" * 68}


class Scene:
    """A folder that everybody can read, with what the attackers run, and one in which they may write."""

    def __init__(self, folder):
        self.folder = folder
        self.source = folder / "source"
        shutil.copytree(PACKAGE / "_store", self.source / "_store", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("attacker.py", "squatter.py"):
            shutil.copy(HERE / name, folder)
        self.theirs = folder / "theirs"
        self.theirs.mkdir()
        self.theirs.chmod(0o777)
        self.job = folder / "job"
        self.job.mkdir(mode=0o700)

    @property
    def public(self):
        """What rank 0 has written down, once the job is up."""
        assert poll((self.job / "public").exists, LIMIT), "rank 0 must come up"
        return json.loads((self.job / "public").read_text())

    def settings(self, public=None, **changes):
        """Return what attackers are told; by default to try everything at the doors of the store that they find."""
        url = urlsplit(public["url"]) if public else urlsplit("")
        settings = {
            "package": str(self.source),
            "addresses": [[url.hostname, url.port]] if url.scheme == "tcp" else [],
            "job": public["job"] if public else "job/0",
            "recorded": public["recorded"] if public else NOTHING_RECORDED,
            "keys": {name: protocol.in_job(key) for name, key in KEYS.items()},
            "notice": NOTICE,
            "marker": str(self.theirs / IS_MARKED),
            "tries": TRIES,
            "kinds": None,
            "waits": False,
            "plants": "",
            "chase": None,
            "crowd": False,
            "others": [],
        }
        return settings | changes

    def open_ports(self, host=None):
        """Return where rank 0 listens itself, as its own host sees it, or what another one can reach of that."""
        found = self.public["ports"]
        if host is None:
            return [[address, port] for address, port in found]
        return [[host, port] for address, port in found if not address.startswith("127.")]

    @contextlib.contextmanager
    def attackers(self, *places):
        """Let attackers do their worst, each in a place, until the end of the block; their results are in the list."""
        results = []
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(self._start("attacker.py", enter)) for enter, _ in places]
            for process, (_, settings) in zip(running, places, strict=True):
                process.stdin.write(json.dumps(settings).encode())
                process.stdin.close()
            yield results
            for process in running:
                said = process.stdout.read().decode()
                assert process.wait(LIMIT) == 0, said
                results.append(json.loads(said))

    @contextlib.contextmanager
    def squatter(self, enter, **settings):
        """Hold names and ports for the length of a block; the dictionary says at its end what came of it."""
        nothing = {"prefix": "", "num_names": 0, "ports": [], "real": [], "job": "", "credentials": []}
        with self._start("squatter.py", enter) as process:
            said = {"package": str(self.source), **nothing, **settings}
            process.stdin.write(json.dumps(said).encode() + b"\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            yield told
            process.stdin.close()
            told |= json.loads(process.stdout.read())

    @contextlib.contextmanager
    def _start(self, program, enter):
        command = [*enter, *AS_ANOTHER_USER, sys.executable, "-I", "-S", "-B", self.folder / program]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={"PATH": os.environ["PATH"]}
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def assert_all_in_vain(found, *, tries=TRIES):
    """Every kind was tried so often, and came to nothing."""
    assert found["uid"] == int(NOBODY)
    assert found["results"]
    assert {kind: got for kind, got in found["results"].items() if got[0] < tries or got[1]} == {}


def assert_unharmed(scene, *launches, num_ranks, told=""):
    """The job went on, its results are right, and nobody heard of anything but of a delay before it began."""
    assert [launch.returncode for launch in launches] == [0] * len(launches)
    complaints = [line for launch in launches for line in launch.stderr.splitlines()]
    assert [line for line in complaints if not told or not line.startswith(told)] == []
    lines = [line for launch in launches for line in launch.lines if line.startswith("{")]
    told = sorted((json.loads(line) for line in lines), key=lambda line: line["rank"])
    assert [line["rank"] for line in told] == list(range(num_ranks))
    assert len({line["rounds"] for line in told}) == 1
    assert told[0]["rounds"] > 0
    assert not (scene.theirs / IS_MARKED).exists()
    sys.stdout.write(f"rounds, and the median of their milliseconds: {told[0]}\n")


def rank_command(scene):
    return [PYTHON, JOB, str(scene.job)]
