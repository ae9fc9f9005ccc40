"""Users' own type checkers: what they find in typical code, and that they find mistakes in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CODE = Path(__file__).parent / "typing"
NO_PATH = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
WRONG = CODE / "wrong_user_code.py"


def mypy(file, folder):
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", str(file)]
    return complaints(command, folder, r":(\d+): error:")


def pyright(file, folder):
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "reportUnusedExpression": false}')
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--project",
        str(folder),
        "--pythonpath",
        sys.executable,
        str(file),
    ]
    return complaints(command, folder, r":(\d+):\d+ - error:")


def complaints(command, folder, pattern):
    """Return the lines with mistakes, and all that was said; no path of the environment leads to the package."""
    finished = subprocess.run(command, cwd=folder, env=NO_PATH, capture_output=True, text=True, check=False)
    return [int(line) for line in re.findall(pattern, finished.stdout)], finished.stdout + finished.stderr


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_typical_code_has_no_mistakes(checker, tmp_path):
    lines, said = checker(CODE / "user_code.py", tmp_path)
    assert lines == [], said


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_mistakes_are_found(checker, tmp_path):
    text = WRONG.read_text().splitlines()
    mistakes = range(text.index("# mistakes") + 2, len(text) + 1)
    lines, said = checker(WRONG, tmp_path)
    assert sorted(set(lines)) == list(mistakes), said
