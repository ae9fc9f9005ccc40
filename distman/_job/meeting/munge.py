"""munge: a text that only processes of this user can read, on all hosts whose munge daemons share a key.

The daemon asks the kernel who is at the other end of its socket. So what it says of a credential holds on every host of
a cluster: which user had it made, and that nobody but the user that it was made for can have it decoded.

Source:
    munge(1), unmunge(1) and munge_enum(3) of MUNGE 0.5; AuthInfo: slurm.conf(5).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from distman.errors import RendezvousError

_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")  # the second where slurmd fetches it
_AUTH_INFO = re.compile(r"^[^#\n]*?\bAuthInfo\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_USUAL_SOCKET = "/run/munge/munge.socket.2"
_UID = re.compile(rb"UID: .*\((\d+)\)")

# Exit codes of both programs, munge_err_t.
_OWN_FAULTS = (1, 5, 6, 7)  # something else, no memory, no daemon at the socket, no answer: no credential is to blame
# Expired, rewound (made in the future), replayed (decoded here before, by a neighbour say): the user and the text are
# given and proved all the same. That somebody answers now, who knows the text, the handshake proves.
_PROVED = (0, 15, 16, 17)


class CredentialError(RendezvousError):
    """What another process sent as a credential proves nothing."""


class DaemonError(RendezvousError):
    """This host's daemon does not answer, or refuses: processes here can prove nothing by it."""


def find_socket(environ: Mapping[str, str]) -> str | None:
    """Return where the munge daemon of this host listens for Slurm; None without it, or without its programs."""
    path = _configured_socket(environ) or _USUAL_SOCKET
    return path if Path(path).is_socket() and all(map(shutil.which, ("munge", "unmunge"))) else None


def seal(payload: bytes, path: str) -> bytes:
    """Return a credential that only processes of this user can open; raise DaemonError if the daemon does not help."""
    done = _run(["munge", f"--restrict-uid={os.geteuid()}"], path, payload)
    if done.returncode != 0:
        raise DaemonError(_failed("making", path, _reason(done)))
    return done.stdout.strip()


def unseal(credential: bytes, path: str) -> bytes:
    """Return what a process of this user has sealed, on whatever host and whenever; else raise CredentialError."""
    done = _run(["unmunge", "--keys=UID"], path, credential)
    maker = _UID.match(done.stdout)
    if done.returncode in _OWN_FAULTS:
        raise DaemonError(_failed("reading", path, _reason(done)))
    if done.returncode not in _PROVED or maker is None:
        raise CredentialError(
            f"the store's credential must be one that munge made for uid {os.geteuid()}, got one of which it says: "
            f"{_reason(done)}. See which process answers there, and that all hosts have the same munge key."
        )
    if int(maker[1]) != os.geteuid():
        raise CredentialError(
            f"the store's credential must be made by this user, uid {os.geteuid()}, got one of uid {int(maker[1])}. "
            "See which process answers there: it is not of this job."
        )
    return done.stdout.partition(b"\n\n")[2]


def _configured_socket(environ: Mapping[str, str]) -> str | None:
    files = [environ["SLURM_CONF"]] if environ.get("SLURM_CONF") else _CONFIGURATIONS
    for file in files:
        try:
            found = _AUTH_INFO.search(Path(file).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        options = found[1].split(",") if found else []
        return next((option.partition("=")[2] for option in options if option.lower().startswith("socket=")), None)
    return None


def _run(command: list[str], path: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([*command, f"--socket={path}"], input=data, capture_output=True, check=False)
    except OSError as error:
        raise DaemonError(_failed("asking for", path, error.strerror or "")) from error


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip().partition("Error: ")[2] or f"exit code {done.returncode}"


def _failed(what: str, path: str, reason: str) -> str:
    return (
        f"{what} the credential of the job by munge failed on {socket.gethostname()}: {reason} [socket {path}]. See "
        "that munged runs there, or export DISTMAN_SECRET in the job script."
    )
