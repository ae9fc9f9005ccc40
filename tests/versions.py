"""The tests with other versions of torch, each in an environment of its own, and the table of what they found.

    make test-versions                                        # the tests that need no launcher, with all versions
    make test-versions ARGUMENTS='2.8.0 2.14.1 -- -m unit'     # the unit tests, with two of them

An environment takes 5 to 8 GB, most of them CUDA's libraries. It is kept for the next call where the disk has room for
another one, else removed. uv makes them: it shares equal files among them, and finds the interpreters.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
HOME = REPOSITORY / ".venv-versions"
PAGE = REPOSITORY / "docs" / "versions.md"
VERSIONS = {
    "2.8.0": "3.11",
    "2.9.1": "3.12",
    "2.10.0": "3.12",
    "2.11.0": "3.12",
    "2.12.1": "3.13",
    "2.13.0": "3.11",
    "2.14.1": "3.13",
    "2.15.0": "3.13",
}
"""Each torch, with the Python that it is tried with."""
NOT_PINNED = ("cloudpickle", "setuptools", "tensordict", "torch")
"""What some version of torch excludes, and what users get in a newer version than ours."""
WITHOUT_LAUNCHERS = ["--ignore=tests/launch", "--ignore=tests/test_packaging.py"]
RULE = "| --- | --- | --- | --- | --- | --- | --- |"
ROOM = 9 << 30
"""Bytes that an environment may take."""
ABOUT = "import sys, numpy; print(*sys.version.split()[:1], numpy.__version__)"


def main(arguments: Sequence[str]) -> int:
    """Try the versions that are named, or all; return 1 if a test failed with one of them."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    versions, tests = arguments[:end], arguments[end + 1 :]
    failed = False
    for version in versions or VERSIONS:
        python = made(version)
        command = [python, "-m", "pytest", "--numprocesses=2", "--dist=worksteal", *(tests or WITHOUT_LAUNCHERS)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
            last = ""
            for line in process.stdout or ():
                sys.stdout.write(line)
                last = line.strip() or last
        failed = failed or process.returncode != 0
        note(version, python, " ".join(tests) or "all but launchers", last)
        if shutil.disk_usage(HOME).free < ROOM:
            shutil.rmtree(HOME / f"torch-{version}")
    return int(failed)


def made(version: str) -> Path:
    """Return the interpreter of the environment with a version of torch, which is made if it is not there."""
    python = HOME / f"torch-{version}" / "bin" / "python"
    if python.exists():
        return python
    uv = HOME / "tools" / "bin" / "uv"
    if not uv.exists():
        run(sys.executable, "-m", "venv", HOME / "tools")
        constraints = REPOSITORY / ".ci" / "constraints.txt"
        run(HOME / "tools/bin/python", "-m", "pip", "install", "--quiet", "--constraint", constraints, "uv")
    run(uv, "venv", "--quiet", "--seed", "--python", VERSIONS.get(version, "3.13"), python.parents[1])
    pins = [line for line in (REPOSITORY / ".ci/constraints.txt").read_text().splitlines() if not is_free(line)]
    (HOME / "constraints.txt").write_text("\n".join(pins) + "\n")
    wanted = [f"torch=={version}", "--editable", ".[test]"]
    run(uv, "pip", "install", "--quiet", "--python", python, "--constraint", HOME / "constraints.txt", *wanted)
    return python


def is_free(line: str) -> bool:
    """Return whether a line of the constraints does not bind these environments."""
    return line.partition("==")[0] in NOT_PINNED


def run(*command: str | Path) -> str:
    """Run a program and return what it printed; it must succeed."""
    return subprocess.run([*command], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True).stdout


def note(version: str, python: Path, tests: str, last: str) -> None:
    """Write a row of the table, in the place of an older one of the same version and tests."""
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    failures = int(counts.get("failed", 0)) + int(counts.get("errors", counts.get("error", 0)))
    numbers = run(python, "-c", ABOUT).split()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = f"| {version} | {' | '.join(numbers)} | `{tests}` | {counts.get('passed', 0)} | {failures} | {today} |"
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\| \d.* \d{4}-\d\d-\d\d \|$", text, re.MULTILINE)
    others = [one for one in found if not (one.startswith(f"| {version} |") and f"| `{tests}` |" in one)]
    rows = sorted([*others, row], key=lambda one: [int(part) for part in re.findall(r"\d+", one)[:2]])
    for one in found:
        text = text.replace(f"{one}\n", "")
    head, _, rest = text.partition(f"{RULE}\n")
    PAGE.write_text("\n".join([f"{head}{RULE}", *rows, rest]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
