"""Running a launcher in a test: a hard time limit, an account of what it said, nothing left of it afterwards.

Every process that a launch starts, on whatever virtual host, carries a marker in its environment. The marker
finds them again in ``/proc``: to show the stacks of the stuck ones, to end them, to prove that none is left.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO
from uuid import uuid4

import pytest

from . import preloaded

MARKER = "TEST_DISTMAN_LAUNCH"
THIS_SESSION = uuid4().hex

# What a launcher around the test run itself may have left in the environment.
LAUNCHER_VARIABLES = re.compile(
    r"(SLURM|SBATCH|SALLOC|SRUN|OMPI|PRTE|PMIX|PMI|HYDRA|HYDI|MPI|MPIR|I_MPI|MV2|PALS|JSM|FLUX|TORCHELASTIC)_.*"
    r"|DISTMAN_.*|SLURMD_NODENAME|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)


@dataclass(frozen=True)
class Finished:
    """A launch that has ended; ``str()`` of it is the whole account."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """The lines of standard output in sorted order, since ranks print in any order."""
        return sorted(self.stdout.splitlines())

    def __str__(self) -> str:
        name = f" ({signal.Signals(-self.returncode).name})" if self.returncode < 0 else ""
        return _account(self.command, f"exit code {self.returncode}{name}", self)


class Running:
    """A launch under way, made by `start`."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str | None], cwd: Path | None) -> None:
        self.command = tuple(str(word) for word in command)
        self.marker = f"{THIS_SESSION}-{uuid4().hex}"
        self._directory = Path(tempfile.mkdtemp(prefix="distman-launch-"))
        self._nothing = Path(os.devnull).open("rb")  # noqa: SIM115 - `_remove_files` closes it, with the others
        self._stdout = (self._directory / "stdout").open("a+b")
        self._stderr = (self._directory / "stderr").open("a+b")
        self._began = time.monotonic()
        try:
            self._process = self._popen(env, cwd)
        except BaseException:
            self._remove_files()
            raise

    def _popen(self, env: Mapping[str, str | None], cwd: Path | None) -> "subprocess.Popen[bytes] | preloaded.Fork":
        temporary = self._directory / "tmp"
        temporary.mkdir()
        markers = f"{os.environ.get(MARKER, '')} {self.marker}"  # this test session may be part of a launch
        server = preloaded.server_variables() if str(preloaded.PYTHON) in self.command else {}
        variables = launch_environment({"TMPDIR": str(temporary), MARKER: markers, **server, **env})
        if self.command[0] == str(preloaded.PYTHON):
            files = [self._nothing.fileno(), self._stdout.fileno(), self._stderr.fileno()]
            return preloaded.Fork(self.command[1:], env=variables, cwd=cwd, files=files)
        return subprocess.Popen(
            self.command,
            stdin=self._nothing,
            stdout=self._stdout,
            stderr=self._stderr,
            env=variables,
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id of the launcher itself."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return _read(self._stdout)

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return _read(self._stderr)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def returncode(self) -> int | None:
        """The exit code of the launcher; None while it runs."""
        return self._process.poll()

    def wait_for_output(self, text: str, *, times: int = 1, timeout: float = 30.0) -> None:
        """Return when ``text`` was printed so many times; fail when the launch or the time ends first."""
        __tracebackhide__ = True
        self._wait_until(
            lambda: self.stdout.count(text) >= times or self._process.poll() is not None,
            timeout,
            f"for {text!r}",
        )
        if self.stdout.count(text) < times:
            pytest.fail(f"ended without printing {text!r} {times} times\n{self.wait(timeout=1.0)}")

    def wait(self, *, timeout: float) -> Finished:
        """Return the account of the launch when it has ended; end it and fail when that takes too long."""
        __tracebackhide__ = True
        self._wait_until(lambda: self._process.poll() is not None, timeout, "to end")
        finished = Finished(self.command, self._process.returncode, self.stdout, self.stderr, self.seconds)
        sys.stdout.write(f"{finished}\n")  # pytest shows it when the test fails
        return finished

    def _wait_until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        __tracebackhide__ = True
        if not poll(condition, timeout):
            alive = "\n".join(f"    {process}" for process in marked(self.marker))
            self.ask_for_stacks()
            self.end()
            outcome = f"ended by the test, which waited {timeout:g} s {what}; alive until then:\n{alive}"
            pytest.fail(_account(self.command, outcome, self))

    def ask_for_stacks(self) -> None:
        """Make every Python process print its stacks, which ends it; the launcher may pass the words on."""
        for process in marked(self.marker):
            if process.is_python:
                process.send(signal.SIGABRT)
        poll(lambda: self._process.poll() is not None, 3.0)

    def end(self) -> None:
        """End the launcher, politely first so that it can tidy up, then everything it started."""
        if self._process.poll() is None:
            self._process.terminate()
            poll(lambda: self._process.poll() is not None, 2.0)
        kill_all(lambda: marked(self.marker))
        self._process.kill()
        self._process.wait()

    def _close(self) -> None:
        if self._process.poll() is None:
            self.end()
        self._remove_files()

    def _remove_files(self) -> None:
        self._nothing.close()
        self._stdout.close()
        self._stderr.close()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def start(
    command: Sequence[str | Path], *, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> Iterator[Running]:
    """Start a launcher for the length of a ``with`` block; what still runs at its end is ended.

    ``env`` adds variables, or removes those given as None, to and from `launch_environment`.
    """
    running = Running(command, env or {}, cwd)
    try:
        yield running
    finally:
        running._close()


def launch(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 30.0,
    cwd: Path | None = None,
) -> Finished:
    """Run a launcher to its end; after ``timeout`` seconds, end all of it and fail with the account."""
    __tracebackhide__ = True
    with start(command, env=env, cwd=cwd) as running:
        return running.wait(timeout=timeout)


def launch_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a launch: this one without any launcher's variables, then the changes."""
    inherited = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    environment = {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": None,  # it writes a line in pieces, which those of other ranks come between
        **changes,
    }
    return {name: value for name, value in environment.items() if value is not None}


@cache
def private_shared_memory() -> Sequence[str]:
    """Return the beginning of a command line whose rest has its own /dev/shm, where nobody else leaves anything."""
    private = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"']
    allowed = subprocess.run([*private, "true"], capture_output=True, check=False, timeout=10).returncode == 0
    return private if allowed else []


@dataclass(frozen=True)
class Process:
    """A process found in ``/proc``."""

    pid: int
    command: str

    @property
    def is_python(self) -> bool:
        """Whether this is a Python interpreter, which prints its stacks on SIGABRT."""
        return Path(self.command.split()[0]).name.startswith("python") if self.command else False

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def __str__(self) -> str:
        return f"pid {self.pid}: {self.command[:200]}"


def processes(belongs: Callable[[Path], bool]) -> list[Process]:
    """Return the living processes whose folder in ``/proc`` is accepted by ``belongs``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked, or is not ours
            if belongs(folder):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(Process(int(folder.name), command))
    return found


def marked(marker: str = THIS_SESSION) -> list[Process]:
    """Return the living processes of one launch, or of all launches of this test session."""
    return processes(lambda folder: marker.encode() in (folder / "environ").read_bytes())


def kill_all(find: Callable[[], list[Process]]) -> None:
    """Kill what ``find`` finds until it finds nothing more."""

    def none_left() -> bool:
        for process in (left := find()):
            process.send(signal.SIGKILL)
        return not left

    if not poll(none_left, 10.0):
        pytest.fail("cannot be killed: " + ", ".join(str(process) for process in find()))


def assert_nothing_left(marker: str = THIS_SESSION, *, within: float = 5.0) -> None:
    """Fail, and kill them, if processes of a launch (or of any) are still alive after so many seconds."""
    __tracebackhide__ = True
    if not poll(lambda: not marked(marker), within):
        left = "\n".join(str(process) for process in marked(marker))
        kill_all(lambda: marked(marker))
        pytest.fail(f"still alive {within:g} s after the end of the launch (now killed):\n{left}")


def poll(condition: Callable[[], bool], timeout: float, *, interval: float = 0.02) -> bool:
    """Return whether the condition came true within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def _read(file: IO[bytes]) -> str:
    return Path(file.name).read_text(errors="replace")


def _account(command: tuple[str, ...], outcome: str, said: Finished | Running) -> str:
    if command[0] == "nsenter":
        command = command[command.index("--") + 1 :]
    parts = [f"$ {shlex.join(command)}", f"{outcome}, after {said.seconds:.1f} s"]
    for name, text in (("standard output", said.stdout), ("standard error", said.stderr)):
        parts += [f"--- {name}", text.rstrip()] if text.strip() else [f"--- {name}: empty"]
    return "\n".join(parts)
