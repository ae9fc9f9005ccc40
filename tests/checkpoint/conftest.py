"""A disk that is soon full."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "distman-test", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount one: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
