"""Where the secret of a job comes from: what its processes know, and other users and hosts do not.

The source follows from the launcher, the variables and the number of hosts, which are equal on all ranks, and never
from what another process says: nobody can talk a rank out of its secret.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import os
import secrets
import stat
from collections.abc import Mapping

from distman._base import timing
from distman._job.meeting import munge
from distman._job.meeting.address import is_on_one_host, is_sent_over_mpi
from distman._job.meeting.munge import CredentialError
from distman._store.transport import is_nobody
from distman.environments import LAUNCHERS, LaunchEnvironment
from distman.errors import LaunchEnvironmentError, RendezvousError

_VARIABLE = "DISTMAN_SECRET"
_FILE_VARIABLE = "DISTMAN_SECRET_FILE"
_REQUIRED = "required"  # shorter than any secret

_MIN_CHARACTERS = 32  # 128 bits, if they are hexadecimal digits: a guest may try as many guesses as he likes, elsewhere
_MAX_BYTES = 4096  # of a file; more is another file than was meant
_KEY_BYTES = 32  # hexadecimal digits
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PAYLOAD = b"distman door 1\0"  # a credential that the user had made for another service does not begin like this

_DRAW = 'export DISTMAN_SECRET="$(openssl rand -hex 32)"'

OPEN_AGENTS = (
    "Nothing shows that the launcher's agents meet by a static rendezvous. By any other one (c10d, --standalone, or "
    "torchrun on one node without --master-port) every user and host that reaches an agent's port can run code as you. "
    "On one host, start the job with `distman run`; otherwise pass torchrun --rdzv-backend=static, --node-rank, "
    "--master-addr and --master-port, and no UUID as --rdzv-id."
)
IF_STATIC = "if torchrun's rendezvous is static, which its variables do not tell; `distman check` finds out"


class Source(enum.Enum):
    """Where the secret comes from, in words; of KERNEL and NONE, what there is instead."""

    VARIABLE = f"the secret in {_VARIABLE}"
    FILE = f"the secret in the file that {_FILE_VARIABLE} names"
    KERNEL = "the kernel, which says whose process is at the other end: all ranks are on one host"
    MPI = "a secret that rank 0 draws and tells the others over MPI"
    GROUP = "a secret that one rank draws and tells those that read the store of the process group"
    MUNGE = "a secret that munge shows to processes of this user only"
    NONE = "nothing"


class Agents(enum.Enum):
    """How the launcher's agents meet: nothing in a static rendezvous is unpickled."""

    STATIC = "static"
    NOT_STATIC = "not static, or not known to be"
    UNKNOWN = "not shown by the variables"


@dataclasses.dataclass(frozen=True)
class Protection:
    """What keeps others out of the job."""

    source: Source
    key: bytes | None = dataclasses.field(default=None, repr=False)  # the secret, where every rank has it beforehand
    socket: str = ""  # that of the munge daemon, if it is asked
    agents: Agents | None = None  # of the launcher, which start programs as the user; None where it has none

    @property
    def has_secret(self) -> bool:
        """Whether the ranks share a secret, be it drawn later."""
        return self.source not in (Source.KERNEL, Source.NONE)

    @property
    def asks_kernel(self) -> bool:
        """Whether ranks on one host believe the kernel whose process is at the other end."""
        return not (self.has_secret and is_nobody())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What rank 0 has to say where strangers can run code as the user: in the job, or in the launcher's agents."""
        open_job = (
            "Nothing keeps other users out of this job: it may run on several hosts, which share no secret. Every user "
            "and host that reaches its hosts can join it, and run code as you. In the job script, write "
            f"{_DRAW}, or see the page on the secret of a job."
        )
        said = {open_job: self.source is Source.NONE, OPEN_AGENTS: self.agents is Agents.NOT_STATIC}
        return tuple(sentence for sentence, is_true in said.items() if is_true)

    @property
    def protected_by(self) -> str | None:
        """What keeps strangers from running code as the user, in words; None where nothing does."""
        if self.warnings:
            return None
        return f"{self.source.value}, {IF_STATIC}" if self.agents is Agents.UNKNOWN else self.source.value

    def draw(self, job_id: str) -> tuple[bytes | None, bytes]:
        """Return the secret, drawn anew where nobody has it beforehand, and what the store sends before any proof."""
        # Of the latter there is something with munge only.
        if self.source not in (Source.MPI, Source.GROUP, Source.MUNGE):
            return self.key, b""
        key = secrets.token_hex(_KEY_BYTES // 2).encode()
        return key, munge.seal(_payload_of(job_id) + key, self.socket) if self.source is Source.MUNGE else b""

    def read(self, job_id: str, credential: bytes) -> bytes | None:
        """Return the secret that the other side has to prove; None where there is none."""
        # Not for MPI, which tells it. CredentialError: the other side has not sent what this job's store would send.
        if bool(credential) is not (self.source is Source.MUNGE):
            theirs = "sends one of munge" if credential else "sends no credential of munge"
            raise CredentialError(
                f"the store must know the secret from where this rank has it ({self.source.value}), got one that "
                f"{theirs}. Start all ranks in one way, with the same {_VARIABLE}, on hosts where munge runs or none."
            )
        if self.source is not Source.MUNGE:
            return self.key
        payload, expected = munge.unseal(credential, self.socket), _payload_of(job_id)
        if not payload.startswith(expected) or len(payload) != len(expected) + _KEY_BYTES:
            raise CredentialError(
                f"the store's credential must be made for job {job_id!r}, got one for something else. See which "
                "process answers there: it is of another job."
            )
        return payload[len(expected) :]


NO_PROTECTION = Protection(Source.NONE)


def find_protection(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Protection:
    """Return what keeps others out of the job, as far as the variables tell."""
    found = dataclasses.replace(_find_source(environment, environ), agents=find_agents(environment, environ))
    return _checked_if_required(found, environ)


def learn_protection(found: Protection, environment: LaunchEnvironment, environ: Mapping[str, str]) -> Protection:
    """Return what keeps others out of the job, after a look at what the variables do not tell. It takes torch."""
    if found.agents is Agents.UNKNOWN:
        found = dataclasses.replace(found, agents=_ask_agent(environment, environ))
    return _checked_if_required(found, environ)


def find_agents(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Agents | None:
    """Return how the launcher's agents meet, as far as the variables tell; None where it has no agents."""
    agent = LAUNCHERS[environment.launcher].agent
    if agent is None:
        return None
    may_be_safe = agent.may_be_safe(environ, _launchers_job_id(environment, environ))
    return Agents.UNKNOWN if may_be_safe else Agents.NOT_STATIC


def _ask_agent(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Agents:
    from distman._torch_internals import is_static_rendezvous

    if environment.main_address is None or environment.main_port is None or environment.node_rank is None:
        return Agents.NOT_STATIC
    place, job_id = (environment.main_address, environment.main_port), _launchers_job_id(environment, environ)
    is_static = is_static_rendezvous(place, job_id, environment.node_rank, timing.AGENT_ANSWER)
    return Agents.STATIC if is_static else Agents.NOT_STATIC


def _launchers_job_id(environment: LaunchEnvironment, environ: Mapping[str, str]) -> str:
    """Return the job id of the launcher, whatever the user calls the job."""
    names = LAUNCHERS[environment.launcher].fields.get("job_id", ())
    return next((environ[name] for name in names if name in environ), "")


def _find_source(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Protection:
    text = environ.get(_VARIABLE)
    if text is not None and not _is_required(environ):
        return Protection(Source.VARIABLE, _checked(text.strip().encode(errors="surrogateescape"), _VARIABLE))
    if environ.get(_FILE_VARIABLE) is not None:
        return Protection(Source.FILE, _read_file(environ[_FILE_VARIABLE]))
    return _without_variables(environment, environ)


def _checked_if_required(found: Protection, environ: Mapping[str, str]) -> Protection:
    if not _is_required(environ):
        return found
    if found.source is Source.NONE:
        raise RendezvousError(
            f"{_VARIABLE} must be a secret in this job, got {_REQUIRED!r} from the environment, and nothing protects "
            f"the job without one: it may run on several hosts. In the job script, write {_DRAW}."
        )
    if found.agents is Agents.NOT_STATIC:
        raise RendezvousError(f"{_VARIABLE} must not be {_REQUIRED!r} in a job with open agents. {OPEN_AGENTS}")
    return found


def _is_required(environ: Mapping[str, str]) -> bool:
    return environ.get(_VARIABLE, "").strip().lower() == _REQUIRED


def check_adoption(environ: Mapping[str, str]) -> None:
    """Refuse to take part in a process group that other code made, where the user wants to be protected."""
    if _is_required(environ):
        raise RendezvousError(
            f"the process group must be made by DistributedManager.initialize() where {_VARIABLE} is {_REQUIRED!r}, "
            "got one that other code made, whose store lets everybody in. Leave init_process_group() out."
        )


def _without_variables(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Protection:
    if is_on_one_host(environment, environ):
        if environment.world_size > 1 and is_nobody():
            raise RendezvousError(
                "the ranks of a job on one host must have a secret, or a user whom the kernel tells from others, got "
                f"uid {os.geteuid()}, which stands for all who have no number here. In the job script, write {_DRAW}."
            )
        return Protection(Source.KERNEL)
    if is_sent_over_mpi(environment, environ):
        return Protection(Source.MPI)
    socket = munge.find_socket(environ) if LAUNCHERS[environment.launcher].uses_munge else None
    if socket is not None:
        return Protection(Source.MUNGE, socket=socket)
    return NO_PROTECTION


def _payload_of(job_id: str) -> bytes:
    return _PAYLOAD + job_id.encode(errors="surrogateescape") + b"\0"


def _checked(secret: bytes, name: str) -> bytes:
    if len(secret) < _MIN_CHARACTERS:
        raise LaunchEnvironmentError(
            f"{name} must hold a secret of at least {_MIN_CHARACTERS} characters, got {len(secret)}. Draw one in the "
            f"job script: {_DRAW}."
        )
    return secret


def _read_file(path: str) -> bytes:
    """Return the secret in a file that nobody else can read or have put there."""
    if not path.startswith("/"):  # it may be the secret itself, by mistake
        raise LaunchEnvironmentError(
            f"{_FILE_VARIABLE} must be the whole path of a file, got a text of {len(path)} characters that does not "
            "begin with /. Give the path, not the secret."
        )
    try:
        # Not to wait for the other end of a pipe that somebody has put there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_file(path, os.fstat(descriptor))
            secret = os.read(descriptor, _MAX_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = "a symbolic link" if error.errno == errno.ELOOP else f"{error.strerror}"
        raise _bad_file(path, "be a file that this user can read", reason) from error
    return _checked(secret.strip(), f"{_FILE_VARIABLE}={path}")


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _bad_file(path, "be a regular file", "something else")
    if status.st_uid != os.geteuid():
        raise _bad_file(path, f"belong to this user, uid {os.geteuid()}", f"one of uid {status.st_uid}")
    if status.st_mode & _OTHERS:
        raise _bad_file(path, "have mode 0600", f"{stat.S_IMODE(status.st_mode):04o}")
    if status.st_size > _MAX_BYTES:
        raise _bad_file(path, f"have at most {_MAX_BYTES} bytes", f"{status.st_size}")


def _bad_file(path: str, condition: str, got: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"{_FILE_VARIABLE}={path} must {condition}, got {got}. Make it anew on each host: "
        f"(umask 077; openssl rand -hex 32 > FILE)."
    )
