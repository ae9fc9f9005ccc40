import signal
import subprocess
import sys

import pytest

from distman._cli.check.shared_folder import removed_at_the_end

ENDED_INSIDE = """
import os, sys, time
from pathlib import Path
from distman._cli.check.shared_folder import removed_at_the_end
with removed_at_the_end(file := Path(sys.argv[1])):
    file.write_text("here")
    os.kill(os.getpid(), int(sys.argv[2]))
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_process_that_is_asked_to_end_leaves_no_file(tmp_path, number, code):
    command = [sys.executable, "-c", ENDED_INSIDE, tmp_path / "file", str(int(number))]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert ended.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_afterwards_signals_mean_what_they_did(tmp_path):
    with removed_at_the_end(tmp_path / "never written"):
        pass
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError):
        leave_by_an_error(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def leave_by_an_error(file):
    with removed_at_the_end(file):
        file.touch()
        raise ValueError
