"""What a shell completes, asked of real shells on a terminal."""

import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from distman._cli.parser import commands, make_parser

from .man_page import options

pytest.importorskip("shtab")

COMMAND = [sys.executable, "-m", "distman"]
END = "DONE"  # a shell that echoes what it is told shows it with a space inside


def script_for(shell, folder):
    path = folder / "completion"
    finished = subprocess.run([*COMMAND, "completion", shell], capture_output=True, text=True, timeout=60, check=True)
    path.write_text(finished.stdout)
    return path


def type_on_a_terminal(command, lines, folder):
    """Return what a shell shows that somebody types lines to."""
    parent, child = pty.openpty()
    environ = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "dumb", "COLUMNS": "1000", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environ, cwd=folder, start_new_session=True
    ):
        os.close(child)
        shown = b""
        for number, line in enumerate([*lines, "exit\n"]):
            os.write(parent, line.encode())
            if line == "exit\n":
                break
            os.write(parent, f"; echo DO'NE'{number}\n".encode())
            while f"DONE{number}".encode() not in shown:
                shown += os.read(parent, 4096)
        while True:
            try:
                shown += os.read(parent, 4096)
            except OSError:  # the shell has gone
                break
    os.close(parent)
    return shown.decode()


CASES = [
    ("distman la", "launch"),
    ("distman com", "completion"),
    ("distman env --js", "--json"),
    ("distman launch --backend torchr", "torchrun"),
    ("distman run --log-dir resu", "results"),
    ("distman run --tee trai", "train.py"),
    ("distman run -n 2 train.py --data resu", "results"),
    ("distman help pl", "plan"),
    ("distman completion fi", "fish"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    return tmp_path


def completed_by(shell, begin, folder):
    """Return what each case becomes by the key of tabulation, as a function of the command's name shows it."""
    shown = type_on_a_terminal(shell, [begin, *(f"{words}\t" for words, _ in CASES)], folder)
    lines = re.findall(r"^\[ (.*?)\s*$", shown.replace("\r", "\n"), re.MULTILINE)
    return [line.rstrip("/") for line in lines]


EXPECTED = [f"{words.rpartition(' ')[0]} {word}" for words, word in CASES]


def test_bash_completes(folder):
    begin = f'source {script_for("bash", folder)}; distman() {{ echo "[ distman $*"; }}'
    assert completed_by(["bash", "--norc", "--noprofile", "-i"], begin, folder) == EXPECTED


def test_zsh_completes(folder):
    if shutil.which("zsh") is None:
        pytest.skip("not installed: zsh")
    begin = f'eval "$(cat {script_for("zsh", folder)})"; distman() {{ echo "[ distman $*" }}'
    assert completed_by(["zsh", "-f", "-i"], f"autoload -U compinit; compinit -u; {begin}", folder) == EXPECTED


def test_fish_completes(folder):
    if shutil.which("fish") is None:
        pytest.skip("not installed: fish")
    script = script_for("fish", folder)
    asked = "; ".join([f"source {script}", *(f"complete -C '{words}'; echo {END}" for words, _ in CASES)])
    finished = subprocess.run(
        ["fish", "--no-config", "-c", asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"]},
    )
    assert finished.stderr == ""
    answers = finished.stdout.split(f"{END}\n")[:-1]
    assert [sorted({line.partition("\t")[0].rstrip("/") for line in answer.splitlines()}) for answer in answers] == [
        [word] for _, word in CASES
    ]


@pytest.mark.parametrize("arguments", [[], ["tcsh"]])
def test_a_shell_that_is_not_known_is_refused(arguments):
    finished = subprocess.run(
        [*COMMAND, "completion", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "usage: distman completion SHELL" in finished.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_option_of_every_command_is_in_each_script(folder, shell):
    text = script_for(shell, folder).read_text()
    flags = [
        flag for _, _, parser in commands(make_parser()) for one, _ in options(parser) for flag in one.option_strings
    ]
    assert len(flags) > 40
    assert [flag for flag in flags if flag.lstrip("-") not in text] == []
