"""A munge daemon of the tests' own, whose key they know, so that they can make what it would not."""

import base64
import hashlib
import hmac
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...launch.processes import poll

_ANY_GROUP = 0xFFFFFFFF


@dataclass(frozen=True)
class Munged:
    """A running daemon.

    Attributes:
        socket: Where it listens.
        process: The daemon itself.
        key: What it shares with the daemons of other hosts.
    """

    socket: str
    process: subprocess.Popen[bytes]
    key: bytes

    def forge(self, payload: bytes, *, uid: int, to: int, age: float = 0.0) -> bytes:
        """Return what a daemon with this key makes for a user, at a time of its own.

        Source:
            MUNGE 0.5, version 3 of the format: ``cred.c`` and ``enc.c``; without cipher, the MAC is HMAC-SHA256.
        """
        head = bytes([3, 0, 5, 0, 0])  # version, cipher, MAC, compression, length of the realm
        numbers = (int(time.time() - age), 300, uid, 0, to, _ANY_GROUP, len(payload))
        body = os.urandom(8) + b"\4\x7f\0\0\1" + struct.pack(">7I", *numbers) + payload
        mac_key = hashlib.sha1(self.key + b"2").digest()  # noqa: S324 - as the daemon does it
        proof = hmac.new(mac_key, head + body, "sha256").digest()
        return b"MUNGE:" + base64.b64encode(head + proof + body) + b":"


@contextmanager
def munge_daemon() -> Iterator[Munged]:
    """Run a daemon for the length of a ``with`` block; every user can reach it."""
    folder = Path(tempfile.mkdtemp(prefix="distman-munge-"))
    folder.chmod(0o755)
    key = os.urandom(1024)
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(key)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder / file}" for option, file in files.items()]
    # --force: it mistrusts root and folders in /tmp
    command = ["setpriv", "--pdeathsig=KILL", "munged", "--foreground", "--force", *options]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        assert poll((folder / "socket").exists, 20.0), (folder / "output").read_text()
        yield Munged(str(folder / "socket"), process, key)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)
