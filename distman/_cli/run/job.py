"""The ranks of a job on this machine: started together, shown, and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fcntl import ioctl
from pathlib import Path
from typing import IO

from distman._base import timing
from distman._base.interpreter import environment, options
from distman._base.private_files import create_anew
from distman._base.process_tree import adopt_orphans, end_descendants, end_with_parent
from distman._cli.run.console import Console
from distman._cli.run.outcome import WANTS_RESTART, Outcome, RankOutcome, last_lines, read_error_file
from distman._cli.signals import heard, is_from_terminal, received
from distman._coordination.failure.record import SILENT
from distman._coordination.stop_signals import DEFAULT_SIGNALS
from distman.environments import DISTMAN_RUN, LAUNCHERS, Family, Place, fake_variables, sets

_ERRORS = 2  # number of the stream
_READ_BYTES = 1 << 16
_LOCALHOST = "127.0.0.1"
_KEPT_BYTES = 1 << 14  # of what a rank wrote last to standard error: a traceback has as much


@dataclasses.dataclass(frozen=True)
class Plan:
    # what the interpreter of each rank is told: a script, or ``-m`` and a module, with its arguments
    command: tuple[str, ...]
    num_ranks: int
    log_dir: Path | None = None  # a file for each rank is made there
    shows_all: bool = True  # whether the terminal shows what all ranks write; else it shows rank 0
    names_ranks: bool = True  # whether their lines begin with the rank
    is_quiet: bool = False  # whether all that the ranks write is shown on standard error
    grace: float = timing.RUN_GRACE  # seconds that ranks have to save once they are asked to stop
    stop_signals: tuple[int, ...] = DEFAULT_SIGNALS  # what asks them


class OutputError(Exception):
    """What the ranks write cannot be shown, or kept in a file."""


def run_job(plan: Plan) -> Outcome:
    """Start the ranks, show what they write, and return when all have ended, with what they started."""
    adopt_orphans()
    with ExitStack() as stack:
        # New files, which only this user can read.
        logs = [stack.enter_context(os.fdopen(create_anew(path), "wb", buffering=0)) for path in _log_files(plan)]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distman-run-", ignore_cleanup_errors=True))
        job = _Job(plan, logs, stack.enter_context(heard(plan.stop_signals)))
        try:
            job.start(Path(folder))
            outcome = job.wait()
        finally:
            end_descendants()
        for one, log in zip(sorted(outcome.ranks, key=lambda one: one.rank), logs, strict=False):
            log.write(one.last_words().encode(errors="backslashreplace"))  # it was left to this process to show them
        return outcome


def _log_files(plan: Plan) -> list[Path]:
    if plan.log_dir is None:
        return []
    plan.log_dir.mkdir(parents=True, exist_ok=True)
    width = len(str(plan.num_ranks - 1))
    return [plan.log_dir / f"rank-{rank:0{width}}.log" for rank in range(plan.num_ranks)]


class _Job:
    def __init__(self, plan: Plan, logs: Sequence[IO[bytes]], signals: socket.socket) -> None:
        num_named = plan.num_ranks if plan.names_ranks else 1
        errors = Console(sys.stderr.buffer, num_named)
        output = errors if plan.is_quiet else Console(sys.stdout.buffer, num_named)
        # Where each stream of the ranks is shown: one terminal is one console.
        self._consoles = {1: output, 2: output if output.is_terminal and errors.is_terminal else errors}
        self._plan = plan
        self._logs = logs
        self._signals = signals
        self._num_shown = plan.num_ranks if plan.shows_all else 1
        self._selector = selectors.DefaultSelector()
        self._running: list[Rank] = []
        self._ended: list[RankOutcome] = []
        self._errors: dict[int, bytes] = {}
        self._steps: list[tuple[float, int]] = []
        self._interruption: int | None = None
        self._overdue: list[int] = []

    def start(self, folder: Path) -> None:
        plan = self._plan
        self._selector.register(self._signals, selectors.EVENT_READ)
        for number, environ in enumerate(variables_of_ranks(os.environ, plan.num_ranks)):
            columns = self._columns() if number < self._num_shown else (None, None)
            rank = Rank(number, plan.command, environ, folder / f"{number}.json", columns)
            self._running.append(rank)
            for descriptor in (rank.end, *rank.outputs):
                self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def _columns(self) -> tuple[int | None, ...]:
        return tuple(console.columns if console.is_terminal else None for console in self._consoles.values())

    def wait(self) -> Outcome:
        try:
            self._attend_all()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error) from error
        ends = [dataclasses.replace(one, last_lines=last_lines(self._errors.get(one.rank, b""))) for one in self._ended]
        return Outcome(tuple(ends), self._interruption, tuple(self._overdue), self._plan.grace)

    def _attend_all(self) -> None:
        with self._selector:
            while self._running:
                self._attend(max(0.0, self._steps[0][0] - time.monotonic()) if self._steps else None)
                self._heed_signals()
                self._take_steps()
            end_descendants()  # what is left behind may write without end
            while self._attend(0.0):  # what they have written last
                pass
        for console in self._consoles.values():
            console.close()

    def _attend(self, seconds: float | None) -> bool:
        """Do what the files say that are readable within a time; False if none was."""
        ready = [key for key, _ in self._selector.select(seconds) if key.data is not None]
        for key in ready:
            if key.fd in key.data.outputs:
                self._forward(key.data, key.fd)
        for key in ready:
            if key.fd == key.data.end:
                self._note_end(key.data)
        return bool(ready)

    def _forward(self, rank: Rank, output: int) -> None:
        stream, data = rank.outputs[output], rank.read(output)
        if not data:
            self._selector.unregister(output)
            rank.close(output)
        if stream == _ERRORS:
            self._errors[rank.rank] = (self._errors.get(rank.rank, b"") + data)[-_KEPT_BYTES:]
        if data and rank.rank < self._num_shown:
            self._consoles[stream].write(rank.rank, data, stream)
        for log in self._logs[rank.rank : rank.rank + 1]:
            log.write(data)

    def _note_end(self, rank: Rank) -> None:
        self._selector.unregister(rank.end)
        rank.reap()
        self._running.remove(rank)
        own, first = read_error_file(rank.error_file) if rank.exit_code else (None, None)
        was_ended = any(rank.exit_code == -number for number in rank.signals)
        self._ended.append(RankOutcome(rank.rank, rank.pid, rank.exit_code or 0, was_ended, own, first))
        if rank.exit_code and not self._steps:
            end = time.monotonic() + (self._plan.grace if rank.exit_code == WANTS_RESTART else timing.RUN_AFTER_FAILURE)
            self._steps = [(end, signal.SIGTERM), (end + self._plan.grace, signal.SIGKILL)]
        if first is not None and first.error_type == SILENT:
            for one in self._running:
                if one.rank == first.rank:
                    one.send(signal.SIGKILL)

    def _heed_signals(self) -> None:
        for number in received(self._signals):
            if number == signal.SIGWINCH:
                for rank in self._running:
                    rank.resize(self._columns())
            elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._end_all(number)
            else:  # what it means is the ranks' business
                self._send(number)

    def _end_all(self, number: int) -> None:
        """Tell the ranks what this process is told; when it is told again, end them at once."""
        now = time.monotonic()
        if self._interruption is not None and number == signal.SIGHUP:
            return  # that a terminal is closed, the kernel says, and a shell again
        if self._interruption is not None:
            self._steps = [(now, signal.SIGKILL)]
        else:
            first = [] if number == signal.SIGINT and is_from_terminal() else [(now, number)]
            is_hurried = number == signal.SIGINT and number not in self._plan.stop_signals
            self._steps = [
                *first,
                (now + (timing.RUN_AFTER_INTERRUPT if is_hurried else self._plan.grace), signal.SIGKILL),
            ]
        self._interruption = number

    def _take_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number = self._steps.pop(0)
            if number == signal.SIGKILL:
                self._overdue += [one.rank for one in self._running if signal.SIGTERM in one.signals]
            self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._running:
            rank.send(number)


def number_of_ranks(wanted: str) -> int:
    """Return how many ranks a number, ``"gpu"``, ``"cpu"`` or ``"auto"`` mean; ValueError where it cannot be."""
    number = int(wanted) if wanted.isascii() and wanted.isdigit() else 0
    if wanted in ("gpu", "auto"):
        import torch  # here: it takes longer to load than all the rest

        number = torch.accelerator.device_count()
    if wanted == "gpu" and not number:
        raise ValueError("n must be a number, cpu or auto where there is no GPU, got gpu. torch sees none here.")
    if wanted == "cpu" or (wanted == "auto" and not number):
        number = len(os.sched_getaffinity(0))
    if not number:
        raise ValueError(f"n must be a number of at least 1, gpu, cpu or auto, got {wanted!r}. Choose one of these.")
    return number


def variables_of_ranks(environ: Mapping[str, str], number: int) -> list[dict[str, str]]:
    """Return the environment of each rank: without what other launchers set, but for those of schedulers."""
    others = [launcher for launcher in LAUNCHERS.values() if launcher.family in (Family.ENV, Family.MPI)]
    common = {name: value for name, value in environ.items() if not any(sets(other, name) for other in others)}
    common.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // number)))
    job_id = f"run-{uuid.uuid4().hex}"
    with socket.socket() as probe:  # for scripts that open torch's own store; ranks of this package need no port
        probe.bind((_LOCALHOST, 0))
        port = probe.getsockname()[1]
    places = [Place(rank, rank, 0, (number,), _LOCALHOST, port, job_id) for rank in range(number)]
    return [common | fake_variables(DISTMAN_RUN, place) for place in places]


class Rank:
    """A process of the job, which ends with this one, whatever ends that.

    ``end`` is a descriptor that is readable when it has ended; ``outputs`` are those of its standard output and error,
    terminals of ``columns`` columns or pipes. ``exit_code`` may be minus the number of a signal; ``signals`` are those
    that its starter has sent.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        error_file: Path,
        columns: Sequence[int | None],
    ) -> None:
        self.rank = rank
        self.error_file = error_file
        self.exit_code: int | None = None
        self.signals: list[int] = []
        ends = [_open_terminal(width) if width is not None else os.pipe() for width in columns]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *options(), "-u", *command],
                env={**environment(environ), "TORCHELASTIC_ERROR_FILE": str(error_file)},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=ends[0][1],
                stderr=ends[1][1],
                preexec_fn=ending_with_starter(signal.SIGKILL),
            )
        except BaseException:  # Ctrl-C too: the descriptors belong to nobody yet
            for ours, _ in ends:
                os.close(ours)
            raise
        finally:
            for _, theirs in ends:
                os.close(theirs)
        self.pid = self._process.pid
        self.end = os.pidfd_open(self.pid)
        self.outputs = {ours: stream for stream, (ours, _) in enumerate(ends, 1)}

    def read(self, output: int) -> bytes:
        """Return what it wrote to one of its outputs; nothing once that has ended."""
        try:
            return os.read(output, _READ_BYTES)
        except OSError:  # a terminal that nobody holds any more
            return b""

    def close(self, output: int) -> None:
        del self.outputs[output]
        os.close(output)

    def resize(self, columns: Sequence[int | None]) -> None:
        for output, stream in self.outputs.items():
            width = columns[stream - 1]
            if width is not None and os.isatty(output):
                _set_width(output, width)

    def reap(self) -> None:
        self.exit_code = self._process.wait()
        os.close(self.end)

    def send(self, number: int) -> None:
        if self.exit_code is None:
            self.signals.append(number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.end, number)


def ending_with_starter(number: int) -> Callable[[], None]:
    """Return what a new process calls to get a signal when this one ends, whatever ends it."""
    starter = os.getpid()

    def prepare() -> None:
        if not end_with_parent(number, starter):
            os._exit(1)

    return prepare


def _open_terminal(columns: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # lines end as the rank ends them
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    _set_width(ours, columns)
    return ours, theirs


def _set_width(terminal: int, columns: int) -> None:
    rows = os.get_terminal_size(terminal).lines or 24
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
