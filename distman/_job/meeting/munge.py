"""libmunge: a text that only processes of this user can read, on all hosts whose munge daemons share a key.

The daemon asks the kernel who is at the other end of its socket. So what it says of a credential holds on every host of
a cluster: which user had it made, and that nobody but the user that it was made for can have it decoded.

Source:
    munge(3), munge_ctx(3) and munge_enum(3) of MUNGE 0.5; AuthInfo: slurm.conf(5).
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from distman.errors import RendezvousError

_LIBRARY = "libmunge.so.2"
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")  # the second where slurmd fetches it
_AUTH_INFO = re.compile(r"^[^#\n]*?\bAuthInfo\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)

_SOCKET, _UID_RESTRICTION = 8, 9  # munge_opt_t
_SUCCESS = 0  # munge_err_t, as all that follow
_OWN_FAULTS = (5, 6, 7)  # no memory, no daemon at the socket, no answer from it: no credential is to blame
# Expired, rewound (made in the future), replayed (decoded here before, by a neighbour say): the user and the text are
# given and proved all the same. That somebody answers now, who knows the text, the handshake proves.
_OLD = (15, 16, 17)


class CredentialError(RendezvousError):
    """What another process sent as a credential proves nothing."""


class DaemonError(RendezvousError):
    """This host's daemon does not answer, or refuses: processes here can prove nothing by it."""


def find_socket(environ: Mapping[str, str]) -> str | None:
    """Return where the munge daemon of this host listens for Slurm; None without it, or without libmunge."""
    try:
        library = _load()
    except OSError:
        return None
    path = _configured_socket(environ) or _default_socket(library)
    return path if Path(path).is_socket() else None


def seal(payload: bytes, path: str) -> bytes:
    """Return a credential that only processes of this user can open; raise DaemonError if the daemon does not help."""
    library = _load()
    made = ctypes.c_char_p()
    with _context(library, path) as context:
        library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_int(os.geteuid()))
        code = library.munge_encode(ctypes.byref(made), context, payload, len(payload))
        if code != _SUCCESS:
            raise DaemonError(_failed("making", path, library.munge_ctx_strerror(context)))
    credential = made.value or b""
    _free(made)
    return credential


def unseal(credential: bytes, path: str) -> bytes:
    """Return what a process of this user has sealed, on whatever host and whenever; else raise CredentialError."""
    library = _load()
    text, length, uid = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint32()
    with _context(library, path) as context:
        places = (ctypes.byref(text), ctypes.byref(length), ctypes.byref(uid), None)
        code = library.munge_decode(credential, context, *places)
        reason = library.munge_ctx_strerror(context)
    payload = ctypes.string_at(text, length.value) if text else b""
    _free(text)
    if code in _OWN_FAULTS:
        raise DaemonError(_failed("reading", path, reason))
    if code != _SUCCESS and code not in _OLD:
        raise CredentialError(
            f"the store's credential must be one that munge made for uid {os.geteuid()}, got one of which it says: "
            f"{_words(reason)}. See which process answers there, and that all hosts have the same munge key."
        )
    if uid.value != os.geteuid():
        raise CredentialError(
            f"the store's credential must be made by this user, uid {os.geteuid()}, got one of uid {uid.value}. "
            "See which process answers there: it is not of this job."
        )
    return payload


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


def _default_socket(library: ctypes.CDLL) -> str:
    path = ctypes.c_char_p()
    context = library.munge_ctx_create()
    library.munge_ctx_get(context, _SOCKET, ctypes.byref(path))
    found = os.fsdecode(path.value or b"")
    library.munge_ctx_destroy(context)
    return found


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY)
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_strerror.restype = ctypes.c_char_p
    library.munge_ctx_strerror.argtypes = library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    # Two named arguments, then one whose type depends on the option.
    library.munge_ctx_get.argtypes = library.munge_ctx_set.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.munge_encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    library.munge_decode.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5]
    return library


@contextmanager
def _context(library: ctypes.CDLL, path: str) -> Iterator[int]:
    context = library.munge_ctx_create()
    if context is None:
        raise MemoryError
    try:
        library.munge_ctx_set(context, _SOCKET, ctypes.c_char_p(os.fsencode(path)))
        yield context
    finally:
        library.munge_ctx_destroy(context)


def _free(pointer: ctypes.c_void_p | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None
    libc.free(pointer)


def _failed(what: str, path: str, reason: bytes | None) -> str:
    return (
        f"{what} the credential of the job by munge failed on {socket.gethostname()}: {_words(reason)} [socket "
        f"{path}]. See that munged runs there, or export DISTMAN_SECRET in the job script."
    )


def _words(reason: bytes | None) -> str:
    return (reason or b"no reason").decode(errors="replace")
