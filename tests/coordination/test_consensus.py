"""Decisions that ranks take together, over a store in memory."""

import functools

import pytest

from distman._coordination import protocol
from distman._coordination.consensus import Consensus
from distman.errors import BarrierTimeoutError, PlanMismatchError, RankFailedError

from .ranks import at_once, store_groups


def members(num_ranks, timeout=10.0):
    return [Consensus(group, timeout) for group in store_groups(num_ranks)]


def num_keys(consensus):
    """Keys that are left, beside the few that do not grow with the number of decisions."""
    return consensus.store_group.store.num_keys()


def test_ranks_that_agree_go_on():
    ranks = members(3)
    assert at_once(*(functools.partial(rank.agree, "plan 0", "d", "the plan") for rank in ranks)) == [None] * 3
    assert num_keys(ranks[0]) == 0


def test_ranks_that_differ_are_shown_both_sides_on_all():
    ranks = members(3)
    digests = ["a", "b", "b"]
    calls = [functools.partial(rank.agree, "plan 0", d, f"plan {d}") for rank, d in zip(ranks, digests, strict=True)]
    results = at_once(*calls)
    for error in results:
        assert isinstance(error, PlanMismatchError)
        assert "rank 0 (n1, pid 100) asks for\n  plan a" in str(error)
        assert "asks for\n  plan b" in str(error)
    assert num_keys(ranks[0]) == 0


def test_calls_that_are_equal_go_on():
    ranks = members(2)
    calls = [functools.partial(rank.compare, "call 0", {"dim": "1"}, place="train.py:3") for rank in ranks]
    assert at_once(*calls) == [None, None]
    assert num_keys(ranks[0]) == 0


def test_calls_that_differ_are_shown_in_a_table_on_all():
    ranks = members(2)
    calls = [
        functools.partial(rank.compare, "call 0", {"dim": str(index)}, place=f"train.py:{index}")
        for index, rank in enumerate(ranks)
    ]
    for error in at_once(*calls):
        assert isinstance(error, PlanMismatchError)
        assert "rank 0 (n1, pid 100): dim 0, at train.py:0\n  rank 1 (n1, pid 101): dim 1, at train.py:1" in str(error)


def test_ranks_that_all_succeed_go_on():
    ranks = members(3)
    assert at_once(*(functools.partial(rank.require_success, "made 0", None) for rank in ranks)) == [None] * 3
    assert num_keys(ranks[0]) == 0


def test_an_error_is_raised_where_it_was_and_told_to_the_others():
    ranks, own = members(3), ValueError("boom")
    errors = [None, own, None]
    calls = [functools.partial(r.require_success, "made 0", error) for r, error in zip(ranks, errors, strict=True)]
    first, second, third = at_once(*calls)
    assert second is own
    for error in (first, third):
        assert isinstance(error, RankFailedError)
        assert (error.rank, error.error_type, error.error_text) == (1, "ValueError", "boom")
    assert num_keys(ranks[0]) == 0


def test_who_waits_for_a_rank_that_does_not_come_gives_up_and_says_so():
    first, second = members(2, timeout=0.0)
    with pytest.raises(BarrierTimeoutError, match=r"did not come: rank 1 \(n1, pid 101\)"):
        first.require_success("made 0", None)
    assert first.store_group.store.check([protocol.failure_of("made 0")]), "a rank that makes its groups gives up too"
    with pytest.raises(RankFailedError, match=r"rank 0 .* raised BarrierTimeoutError"):
        second.require_success("made 0", None)
