"""What attacks have in common."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .attacking import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A folder for a job and for those who attack it."""
    folder = Path(tempfile.mkdtemp(prefix="distman-attack-"))
    folder.chmod(0o755)
    try:
        yield Scene(folder)
    finally:
        shutil.rmtree(folder)
