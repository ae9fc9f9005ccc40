"""Ranks of one host in unlike namespaces, as of containers, go on by whatever the kernel lets pass."""

import subprocess
from pathlib import Path

import pytest

from .conftest import require_namespaces
from .preloaded import PYTHON
from .processes import launch

SCRIPT = Path(__file__).parent / "scripts" / "exchange_apart.py"
OWN_TMP = ["sh", "-c", 'mount -t tmpfs tmpfs "$TMPDIR" && exec "$0" "$@"']
NAMESPACES = {
    "mount": ["unshare", "--mount", *OWN_TMP],
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "time": ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child"],
    "all of these": [
        *("unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("--time", "--monotonic", "-1", "--boottime", "5"),
        *OWN_TMP,
    ],
}


@pytest.mark.parametrize("kind", NAMESPACES)
def test_ranks_in_unlike_namespaces(monkeypatch, tmp_path, kind):
    require_namespaces()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tried = subprocess.run([*NAMESPACES[kind], "true"], capture_output=True, text=True, check=False, timeout=10)
    if tried.returncode != 0:
        pytest.skip(f"no such namespace can be made: {tried.stderr.strip()}")
    start = [PYTHON, "-m", "distman", "run", "-n", "3", "--", str(SCRIPT), *NAMESPACES[kind]]
    done = launch(start, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.lines) == [f"{rank}: rank {rank}: connected to 2" for rank in range(3)]
