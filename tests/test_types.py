"""Users' own type checkers: what they find in typical code, and that they find mistakes in it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

USER_CODE = Path(__file__).parent / "typing" / "user_code.py"
WRONG = Path(__file__).parent / "typing" / "wrong_user_code.py"
NO_PATH = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}


def mypy(python, folder, cache):
    """Ask mypy, which takes from a folder what it knows of torch and of files that are as they were."""
    options = [
        "--strict",
        "--config-file=",
        "--no-error-summary",
        "--cache-dir",
        cache,
        "--python-executable",
        python,
    ]
    return complaints("mypy", *options, folder=folder, pattern=r"(\w+\.py):(\d+): error:")


def pyright(python, folder):
    settings = {"typeCheckingMode": "strict", "reportUnusedExpression": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    options = ["--project", folder, "--pythonpath", python]
    return complaints("basedpyright", *options, folder=folder, pattern=r"(\w+\.py):(\d+):\d+ - error:")


def complaints(module, *options, folder, pattern):
    """Return the lines with mistakes, and all that was said.

    Nothing leads to the package but its installation: no path of the environment, and not the place of the files.
    """
    files = [shutil.copy(file, folder) for file in (USER_CODE, WRONG)]
    command = [sys.executable, "-m", module, *options, *files]
    finished = subprocess.run(command, cwd=folder, env=NO_PATH, capture_output=True, text=True, check=False)
    found = {(name, int(line)) for name, line in re.findall(pattern, finished.stdout)}
    return sorted(found), finished.stdout + finished.stderr


def mistakes():
    """The lines after the comment that announces them."""
    text = WRONG.read_text(encoding="utf-8").splitlines()
    return [(WRONG.name, line) for line in range(text.index("# mistakes") + 2, len(text) + 1)]


EXPECTED = mistakes()


def test_mistakes_are_found_and_nothing_else(tmp_path):
    """By pyright; what mypy finds with the wheel, `test_packaging` shows."""
    found, said = pyright(sys.executable, tmp_path)
    assert found == EXPECTED, said
