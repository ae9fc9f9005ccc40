"""``distman keep``: start a job, and again when it fails, without the host that made it fail."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from distman._base import timing
from distman._base.process_tree import adopt_orphans, end_descendants, running_children
from distman._cli.keep.placement import Here, Placement, place
from distman._cli.keep.verdict import Ended, Notes, Verdict, judge, waits_for_lost_hosts
from distman._cli.output import complain
from distman._cli.parser import add_number
from distman._cli.run.job import ending_with_starter
from distman._cli.run.outcome import OF_A_SHELL
from distman._cli.signals import heard, is_from_terminal, received
from distman._coordination.failure.starter import FAILURE, KEEP_FOLDER

_EPILOG = (
    "A host is bad if one of its ranks fell silent, could not be reached, or was killed from outside; not if the "
    "program raised an error or memory ran out. A host that runs `distman keep` itself cannot be survived."
)
_RESTARTS = 2
_KEPT_BYTES = 1 << 16  # of what was written last to standard error
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distman keep [options] -- srun [options] python train.py"
    parser.description = (
        "Start a job, and start it again when it fails: in an allocation of Slurm without the host that made it fail, "
        "else on this machine. The program itself has to resume from its last checkpoint."
    )
    parser.epilog = _EPILOG
    restarts_help = f"give up after as many in a row without a new checkpoint (default: {_RESTARTS})"
    spare_help = "nodes of the allocation that wait for one to fail"
    until_help = "start again after an end without error until this is saved"
    grace_help = f"for the other ranks to end once one has failed (default: {timing.KEEP_GRACE:g})"
    add_number(parser, "--restarts", least=0, default=_RESTARTS, help=restarts_help)
    add_number(parser, "--spare", least=0, default=0, metavar="K", help=spare_help)
    add_number(parser, "--min-nodes", least=1, metavar="M", help="go on with fewer nodes, and fewer ranks")
    add_number(parser, "--until", least=1, metavar="STEP", help=until_help)
    add_number(parser, "--grace", least=0, default=timing.KEEP_GRACE, metavar="SECONDS", help=grace_help)
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="a folder that all hosts see, for notes (default: this one)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code of the last try."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        arguments.parser.error("name the command that starts the job, such as srun python train.py")
    try:
        placement = place(command, os.environ, arguments.spare, arguments.min_nodes)
    except ValueError as problem:
        arguments.parser.error(str(problem))
    adopt_orphans()
    try:
        with (
            tempfile.TemporaryDirectory(
                prefix=".distman-keep-", dir=arguments.folder or Path.cwd(), ignore_cleanup_errors=True
            ) as folder,
            heard() as signals,
        ):  # also between two tries, when they wait for the next one
            return _Keeper(arguments, placement, Path(folder), signals).run()
    except OSError as error:
        _say(f"{error}. Nothing is running.")
        return 1


@dataclasses.dataclass
class _Keeper:
    arguments: argparse.Namespace
    placement: Placement
    folder: Path
    signals: socket.socket
    bad_hosts: set[str] = dataclasses.field(default_factory=set)
    saved: int = -1  # the step of the last checkpoint
    fruitless: int = 0  # tries in a row without a new one

    def run(self) -> int:
        while True:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            # The ranks write into the folder what happens. The command gets SIGTERM where this process is killed.
            process = subprocess.Popen(
                self.placement.next_command(self.bad_hosts),
                env={**os.environ, KEEP_FOLDER: str(folder)},
                stderr=subprocess.PIPE,
                preexec_fn=ending_with_starter(signal.SIGTERM),
            )
            ended = _Watch(process, folder, self.arguments.grace, self.placement, self.signals).wait()
            notes = Notes.read(folder)
            self._count(notes.saved)
            if self._is_done(ended) or self._gives_up(ended, notes):
                return ended.exit_code
            _say("starts the job again.")

    def _is_done(self, ended: Ended) -> bool:
        """Return whether the job is complete, or is to be ended or queued again by others."""
        until = self.arguments.until
        is_complete = ended.exit_code == 0 and (until is None or self.saved >= until)
        return is_complete or ended.interruption is not None or ended.exit_code == os.EX_TEMPFAIL

    def _gives_up(self, ended: Ended, notes: Notes) -> bool:
        """Say why the try failed, leave out bad hosts, and return whether there can be no further try."""
        if ended.exit_code:
            verdict = judge(notes, ended, self.placement.check)
        else:
            verdict = Verdict(f"it ended before step {self.arguments.until} was saved")
        bad_hosts = sorted(verdict.bad_hosts.intersection(self.placement.hosts))
        self.bad_hosts.update(bad_hosts)
        left_out = f" Left out from now on: {', '.join(bad_hosts)}." if bad_hosts else ""
        saved = "Nothing was saved." if self.saved < 0 else f"Last saved: step {self.saved}."
        _say(f"{verdict.reason}.{left_out} {saved}")
        lack = self.placement.lacks_hosts(self.bad_hosts)
        if self.fruitless > self.arguments.restarts:
            lack = f"{self.fruitless} tries in a row have saved nothing new"
        if lack is not None:
            _say(f"gives up: {lack}.")
        return lack is not None

    def _count(self, saved: int | None) -> None:
        if saved is not None and saved > self.saved:
            self.saved, self.fruitless = saved, 0
        else:
            self.fruitless += 1


@dataclasses.dataclass
class _Watch:
    """One try, to which the signals that this process hears are handed on."""

    process: subprocess.Popen[bytes]
    folder: Path
    grace: float  # seconds in which the command has to end once a rank has failed
    placement: Placement
    signals: socket.socket
    written: bytes = b""  # last to standard error
    interruption: int | None = None
    steps: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # when to send which signal
    is_ended: bool = False

    def wait(self) -> Ended:
        reader = threading.Thread(target=self._show, args=(self.process.stderr,), daemon=True)
        reader.start()
        end = os.pidfd_open(self.process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            selector.register(self.signals, selectors.EVENT_READ)
            while self.process.poll() is None:
                selector.select(timing.KEEP_EVERY)
                for number in received(self.signals):
                    self._hand_on(number)
                self._look_for_failure()
                self._take_steps()
            selector.unregister(end)
            os.close(end)
            has_failed = self.process.returncode != 0 or self.interruption is not None
            if has_failed and isinstance(self.placement, Here):  # srun leaves nothing
                self._end_rest(selector)
        reader.join(timing.KEEP_AFTER_TERM)  # a process that was left behind may hold the other end
        code = self.process.returncode
        return Ended(code if code >= 0 else OF_A_SHELL - code, self._errors, self.interruption, self.is_ended)

    def _end_rest(self, selector: selectors.BaseSelector) -> None:
        """End what the command has left behind, as a shell script does that dies of SIGTERM: it may still save.

        Where this process is asked to end, it has the time that it needs, unless that is asked for again.
        """
        end = math.inf if self.interruption is not None else time.monotonic() + timing.KEEP_AFTER_TERM
        told: set[int] = set()
        while rest := running_children():
            for pid in rest - told:
                os.kill(pid, signal.SIGTERM)
            told |= rest
            selector.select(timing.KEEP_EVERY)
            for number in received(self.signals):
                if number in _ENDING:
                    end = end if self.interruption is None or number == signal.SIGHUP else 0.0  # at once
                    self.interruption = number
            if time.monotonic() >= end:
                end_descendants()

    @property
    def _errors(self) -> str:
        return self.written.decode(errors="backslashreplace")

    def _show(self, stream: IO[bytes]) -> None:
        """Show what is written to standard error, and keep the last of it."""
        while data := os.read(stream.fileno(), _KEPT_BYTES):
            self.written = (self.written + data)[-_KEPT_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads it any more; the command must still be able to write
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()

    def _hand_on(self, number: int) -> None:
        if number in _ENDING:
            self.interruption = number
        if number != signal.SIGWINCH and not (number == signal.SIGINT and is_from_terminal()):
            self.process.send_signal(number)

    def _look_for_failure(self) -> None:
        """Give the command its time to end once a rank has failed; none where it waits for lost hosts alone."""
        if self.is_ended or not any(self.folder.glob(FAILURE.format("*"))):
            return
        is_lost = waits_for_lost_hosts(Notes.read(self.folder), self._errors)
        if is_lost or not self.steps:
            end = time.monotonic() + (0.0 if is_lost else self.grace)
            self.steps = [(end, signal.SIGTERM), (end + timing.KEEP_AFTER_TERM, signal.SIGKILL)]

    def _take_steps(self) -> None:
        while self.steps and self.steps[0][0] <= time.monotonic():
            _, number = self.steps.pop(0)
            if not self.is_ended:
                self.placement.end_step(Notes.read(self.folder).step)
            self.is_ended = True
            self.process.send_signal(number)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, or the terminal is closed
        complain("keep", sentence)
