"""The manager afresh for every test."""

import pytest

from distman._base.process_state import reset


@pytest.fixture(autouse=True)
def fresh_process():
    reset()
    yield
    reset()
