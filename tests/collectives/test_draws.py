"""Some of the exchanges that are drawn at random."""

import pytest

from distman import DistributedManager
from distman.collectives._transport import _segments
from distman.testing import ranks

from .draws import check


@pytest.mark.gloo_only("the backend with NCCL's rules has one way")
@pytest.mark.parametrize("memory", ["1", "0"], ids=["through the host's memory", "over gloo"])
@ranks(3, manager=False)
def test_drawn_exchanges_are_those_of_one_process(monkeypatch, memory):
    monkeypatch.setenv(_segments.VARIABLE, memory)
    DistributedManager.initialize()
    check(range(30))
