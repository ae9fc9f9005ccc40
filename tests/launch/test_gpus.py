"""A rank that fails while others wait for it in a kernel of their GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "fail_in_kernel.py"
LIMIT = 120


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("fault", "told"), [("raise", "ValueError: no more data"), ("kill", "rank 1")])
def test_those_in_a_kernel_hear_why_and_end(fault, told, monkeypatch):
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv("DISTMAN_ALLOW_SHARED_GPU", "1")
    command = [sys.executable, "-m", "distman", "run", "-n", "2", str(SCRIPT), fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode != 0
    assert done.stdout.count("on cuda:") == 2
    assert told in done.stderr
    assert "went on with" not in done.stderr
