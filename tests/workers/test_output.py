"""The end of a forked process is that of an interpreter."""

import pytest

from ..launch.preloaded import PYTHON
from ..launch.processes import launch

PROGRAM = """
import sys
from distman._workers.output import whole_process
with whole_process():
    print("said", end="")
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no licence is left')", 1, "no licence is left\n"),
        ("raise ValueError('boom')", 1, "ValueError: boom\n"),
    ],
)
def test_output_and_exit_code_are_those_of_an_interpreter(end, code, told):
    finished = launch([PYTHON, "-c", PROGRAM.format(end=end)])
    assert (finished.returncode, finished.stdout) == (code, "said")
    assert finished.stderr.endswith(told)
    assert bool(finished.stderr) == bool(told)
