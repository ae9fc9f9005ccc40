import pytest

from ...launch import preloaded


@pytest.fixture
def preloaded_ranks(monkeypatch):
    """The ranks have imported torch, which takes two seconds of a core each."""
    preloaded.stand_in(monkeypatch)
