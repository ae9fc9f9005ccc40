"""Exclusive sections over a store in memory: who waits learns that it is done, or why not."""

import pytest

from distman._coordination.sections import ExclusiveSections
from distman.errors import PlanMismatchError, RankFailedError

from .ranks import store_groups


def begin(num_ranks, what="save()", awaited=(0,), depth=0):
    return [ExclusiveSections(group).begin(what, awaited, depth=depth) for group in store_groups(num_ranks)]


def test_the_others_go_on_once_it_is_done():
    first, second = begin(2)
    assert first.succeed()
    second.wait()


def test_the_last_of_those_awaited_ends_it():
    first, second, third = begin(3, awaited=(0, 1))
    assert not first.succeed()
    assert second.succeed()
    third.wait()


def test_a_failure_is_raised_by_those_that_wait():
    first, second = begin(2)
    record = first.fail(ValueError("boom"))
    assert (record.rank, record.error_type, record.error_text) == (0, "ValueError", "boom")
    with pytest.raises(RankFailedError, match=r"rank 0 .* raised ValueError: boom"):
        second.wait()


def test_one_that_fails_among_several_ends_it_for_all():
    first, second, third = begin(3, awaited=(0, 1))
    second.fail(ValueError("boom"))
    assert not first.succeed()
    for section in (first, third):
        with pytest.raises(RankFailedError, match="boom"):
            section.wait()


def test_the_first_failure_counts():
    first, second, third = begin(3, awaited=(0, 1))
    first.fail(ValueError("one"))
    second.fail(ValueError("two"))
    with pytest.raises(RankFailedError, match="one"):
        third.wait()


def test_ranks_at_different_sections_are_told():
    first, second = store_groups(2)
    ExclusiveSections(first).begin("save()", [0]).succeed()
    with pytest.raises(PlanMismatchError, match=r"got load\(\) on rank 1 \(n1, pid 101\) and save\(\) on another"):
        ExclusiveSections(second).begin("load()", [0]).wait()


def test_a_section_within_another_has_keys_of_its_own():
    sections = ExclusiveSections(store_groups(1)[0])
    outer, inner, after = (sections.begin("x", [0], depth=depth) for depth in (0, 1, 0))
    assert len({outer.key, inner.key, after.key}) == 3
