"""Errors that leave a block which all ranks run: on all of them, or on some."""

import pytest

from distman._coordination.joint_blocks import JointBlocks

from .ranks import at_once, leave, store_groups


def raise_within(blocks, what="train()"):
    with blocks.block(what):
        raise ValueError("boom")


def test_what_all_ranks_raise_is_for_each_to_handle():
    both = [JointBlocks(group) for group in store_groups(2)]
    for _ in range(2):
        errors = at_once(*[lambda blocks=blocks: raise_within(blocks) for blocks in both])
        assert [str(error) for error in errors] == ["boom", "boom"]


def test_the_outermost_block_counts():
    first, second = (JointBlocks(group) for group in store_groups(2))

    def raise_and_handle_within():
        with first.block("train()"):
            with pytest.raises(ValueError, match="boom"):
                raise_within(first, "validate()")
            raise KeyError("later")

    errors = at_once(raise_and_handle_within, lambda: raise_within(second))
    assert [type(error) for error in errors] == [KeyError, ValueError]


def test_nobody_waits_for_a_rank_that_has_left():
    group, other = store_groups(2)
    leave(other.job_store, 1)
    with pytest.raises(ValueError, match="boom"):
        raise_within(JointBlocks(group))
