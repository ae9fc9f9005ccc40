"""The command: ``python -m tests.explore --seed 7 --minutes 30``, or ``--case LINE``."""

import argparse
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tests.launch.preloaded import server_variables

from .cases import FAULTS, LAUNCHERS, Case, draw
from .judge import judge
from .observe import Outcome, run
from .page import Finding, as_markdown
from .starters import STARTERS, Workshop, no_hosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases until the time is over, say what was found, and return whether a promise was broken."""
    options = _options(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that clusters and hosts are taken down
    os.environ["TEST_DISTMAN_WHOLE_END"] = "1"  # of a rank, as of an interpreter: see tests/launch/preloaded/ending.py
    server_variables()  # one process that has imported torch, for all threads
    cases = iter(options.case) if options.case else _wanted(options)
    findings = _Explorer(cases, options).run()
    if options.output:
        command = f"python -m tests.explore --seed {options.seed} --count {len(findings)} --output {options.output}"
        options.output.write_text(as_markdown(findings, command))
    broken = [finding for finding in findings if finding.complaints]
    for finding in broken:
        _say("\n    ".join([f"python -m tests.explore --case '{finding.case}'", *finding.complaints]))
    _say(f"{len(findings)} cases, a promise broken in {len(broken)}")
    return int(bool(broken))


class _Explorer:
    """Runs cases in some threads, each with launchers of its own."""

    def __init__(self, cases: Iterator[Case], options: argparse.Namespace) -> None:
        self._cases = cases
        self._options = options
        self._lock = threading.Lock()
        self._until = time.monotonic() + 60 * options.minutes
        self._findings: list[Finding] = []
        self._errors: queue.Queue[BaseException] = queue.Queue()

    def run(self) -> list[Finding]:
        threads = [threading.Thread(target=self._work) for _ in range(self._options.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._until = 0.0
            for thread in threads:
                thread.join()
        if not self._errors.empty():
            raise self._errors.get()
        return self._findings

    def _work(self) -> None:
        try:
            with Workshop() as workshop:
                while (case := self._next()) is not None:
                    self._add(case, run(case, workshop.launcher(case.launcher)))
        except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
            self._until = 0.0
            self._errors.put(error)

    def _next(self) -> Case | None:
        with self._lock:
            return next(self._cases, None) if time.monotonic() < self._until else None

    def _add(self, case: Case, outcome: Outcome) -> None:
        finding = Finding(case, outcome, tuple(judge(case, outcome)))
        with self._lock:
            self._findings.append(finding)
            said = [f"{len(self._findings)}: {case}: {finding.entry}, in {outcome.seconds:.1f} s", *finding.complaints]
            _say("\n    ".join(said))
            if self._options.verbose and (finding.complaints or self._options.case):
                _say(str(outcome))


def _wanted(options: argparse.Namespace) -> Iterator[Case]:
    missing = {name: STARTERS[name].missing() for name in options.launcher or LAUNCHERS}
    for name, reason in missing.items():
        if reason:
            _say(f"without {name}: {reason}")
    available = [name for name, reason in missing.items() if not reason]
    has_hosts = not no_hosts()
    cases = (
        case
        for case in draw(options.seed)
        if case.launcher in available
        and (has_hosts or case.hosts == 1)
        and (not options.fault or case.faults[0].name in options.fault)
    )
    return islice(cases, options.count)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the cases to draw (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="draw no more after so long (default: %(default)s)")
    parser.add_argument("--count", type=int, help="draw no more than so many cases")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="run so many at once (default: %(default)s)"
    )
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="only this one; may be repeated")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="the same")
    parser.add_argument("--case", action="append", type=Case.parse, help="run this case; may be repeated")
    parser.add_argument("--output", type=Path, help="write what was found here, as Markdown")
    parser.add_argument("--verbose", action="store_true", help="show all that the ranks of a broken case said")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
