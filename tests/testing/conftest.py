"""Running pytest, in a process of its own, on tests written for the occasion."""

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..launch.preloaded import PYTHON, server_variables
from ..workers.preloaded import FORK_SERVERS

LIMIT = 100
WITH_FORKS = f"""
import pytest

class Forks:
    def pytest_sessionstart(self):  # pytest rewrites what nobody has imported before
        {textwrap.indent(FORK_SERVERS, " " * 8).strip()}

raise SystemExit(pytest.main(plugins=[Forks()]))
"""
# Under these, pytest repeats whole error messages in its summary.
CI_VARIABLES = ("CI", "BUILD_NUMBER")


@dataclass(frozen=True)
class PytestRun:
    """What a pytest process said."""

    exit_code: int
    output: str

    def report(self, test):
        """Return the section of one failed test."""
        sections = re.split(r"^_{3,} (.+?) _{3,}$", self.output, flags=re.MULTILINE)
        found = [text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name == test]
        assert len(found) == 1, f"no single report of {test} in:\n{self.output}"
        return found[0].partition("= warnings summary =")[0].partition("= short test summary")[0]

    def counts(self):
        """Return the counts of the last line, such as ``{"passed": 2}``."""
        last = self.output.strip().splitlines()[-1]
        return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last.partition(" in ")[0])}


@dataclass(frozen=True)
class Project:
    """A folder with tests, outside this repository."""

    folder: Path

    def command(self, *arguments, is_fresh=True):
        return [*([sys.executable, "-m", "pytest"] if is_fresh else [PYTHON, "-c", WITH_FORKS]), *arguments]

    def environ(self, **variables):
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_") and name not in CI_VARIABLES
        }
        return {**clean, **server_variables(), "COLUMNS": "160", **variables}

    def write(self, source, name="test_it.py"):
        (self.folder / "pytest.ini").write_text(
            "[pytest]\naddopts = --import-mode=importlib --strict-markers\nfilterwarnings = error\n"
        )
        (self.folder / name).write_text(source)

    def run(self, *arguments, is_fresh=False, **variables):
        """Run pytest; its workers are forks of the preloaded interpreter unless their server is to be fresh."""
        done = subprocess.run(
            self.command(*arguments, is_fresh=is_fresh),
            cwd=self.folder,
            env=self.environ(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return PytestRun(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project"))
