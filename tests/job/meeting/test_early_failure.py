"""Who speaks for a rank that fails before it joins: the rank, and no process that it starts."""

import os
import subprocess
import sys

import pytest

ANSWER = """
import os
from distman._job.meeting.early_failure import is_started_by_rank
print(is_started_by_rank(os.environ))
"""
START = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
START_OTHER = "import subprocess, sys; subprocess.run([sys.executable, 'answer.py'], check=True)"
START_ITSELF = f"""
import subprocess, sys
if sys.argv[1:] == ["--prepare"]:
    {ANSWER.strip().replace(chr(10), chr(10) + "    ")}
else:
    subprocess.run([sys.executable, sys.argv[0], "--prepare"], check=True)
"""
START_BY_SPAWN = f"""
import multiprocessing
def answer():
    {ANSWER.strip().replace(chr(10), chr(10) + "    ")}
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=answer)
    process.start()
    process.join()
"""
START_RANKS = """
import os, subprocess, sys
os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
subprocess.run([sys.executable, "answer.py"], check=True)
"""


@pytest.fixture
def folder(tmp_path):
    scripts = {
        "answer": ANSWER,
        "start": START,
        "other": START_OTHER,
        "itself": START_ITSELF,
        "spawn": START_BY_SPAWN,
        "ranks": START_RANKS,
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


PYTHON = sys.executable
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([PYTHON, "answer.py"], False),
        ([PYTHON, "-u", "-W", "ignore", "answer.py", "--lr", "1"], False),
        (["sh", "-c", f"{PYTHON} answer.py; true"], False),
        ([PYTHON, "start.py", "answer.py"], False),
        ([PYTHON, "start.py", "-u", "answer.py", "--lr", "1"], False),
        ([PYTHON, "other.py"], True),
        (["sh", "-c", f"{PYTHON} other.py; true"], True),
        ([PYTHON, "start.py", "other.py"], True),
        ([PYTHON, "itself.py"], True),
        ([PYTHON, "spawn.py"], True),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(PYTHON, "python") if isinstance(value, list) else str(value),
)
def test_a_process_that_a_rank_starts_does_not_speak_for_it(folder, command, expected):
    assert run(command, folder, {"RANK": "1", "WORLD_SIZE": "2"}) == expected


def test_under_every_launcher_alike(folder):
    assert run([PYTHON, "answer.py"], folder, SLURM) is False
    assert run([PYTHON, "other.py"], folder, SLURM) is True


def test_a_rank_whose_variables_a_program_sets_speaks_for_itself(folder):
    assert run([PYTHON, "ranks.py"], folder, {}) is False


def run(command, folder, variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    finished = subprocess.run(
        command, cwd=folder, env=environ | variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return {"True": True, "False": False}[finished.stdout.strip()]
