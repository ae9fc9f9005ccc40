"""Durations and names of groups that have no meaning, and groups that are gone, give errors that say so."""

import datetime
import decimal
import fractions

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distman import (
    DistributedManager,
    ParallelExecutor,
    ProcessGroupConfig,
    ProcessGroupNode,
    UndefinedGroupError,
    initialize_ddp,
)
from distman.collectives import all_gather_v, broadcast_data, fused_all_reduce
from distman.decorators import on_rank
from distman.metrics import aggregate_loss
from distman.testing import ranks

# Every public call that takes a duration.
DURATIONS = {
    "initialize": lambda value: DistributedManager.initialize(timeout=value),
    "initialize, rendezvous": lambda value: DistributedManager.initialize(rendezvous_timeout=value),
    "initialize_ddp": lambda value: initialize_ddp(value),
    "barrier": lambda value: DistributedManager.initialize().barrier(timeout=value),
    "executor": lambda value: ParallelExecutor(devices=["cpu"], timeout=value),
    "ranks": lambda value: ranks(2, timeout=value),
}


@pytest.mark.parametrize("call", DURATIONS)
@pytest.mark.parametrize("value", ["5m", "300", b"5", [5], True, {"minutes": 5}, decimal.Decimal(5), 5j], ids=repr)
def test_a_duration_that_is_no_number_is_a_type_error(call, value):
    with pytest.raises(TypeError, match="timeout must be a number of seconds or a timedelta, got"):
        DURATIONS[call](value)


@pytest.mark.parametrize("call", DURATIONS)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), -datetime.timedelta(1), np.float32(0)], ids=repr)
def test_a_duration_that_is_not_positive_is_a_value_error(call, value):
    with pytest.raises(ValueError, match=r"timeout must be a positive number of seconds.*, got"):
        DURATIONS[call](value)


@pytest.mark.parametrize("call", DURATIONS)
@pytest.mark.parametrize(
    "value", [5, 0.5, datetime.timedelta(minutes=5), np.float32(5), np.int64(5), fractions.Fraction(1, 2)]
)
def test_a_duration_may_be_any_number_or_a_timedelta(call, value):
    DURATIONS[call](value)


def make_tree(name):
    config = ProcessGroupConfig(ProcessGroupNode(name))
    config.add_node(ProcessGroupNode("leaf", DistributedManager().world_size), parent=name)
    DistributedManager.create_groups_from_config(config)


# Every public call that names new groups.
NEW_NAMES = {
    "subgroup": lambda name: DistributedManager.create_process_subgroup(name, 1),
    "orthogonal": lambda name: DistributedManager.create_orthogonal_process_group(name, "all"),
    "node": lambda name: DistributedManager.create_group_from_node(ProcessGroupNode(name, 1)),
    "root": make_tree,
    "mesh": lambda name: DistributedManager().initialize_mesh((-1, 1), ("row", name)),
}

# Every public call that names a group that there is; some of them take None for the world.
NAMES = {
    "group": lambda name: DistributedManager().group(name),
    "group_size": lambda name: DistributedManager().group_size(name),
    "group_rank": lambda name: DistributedManager().group_rank(name),
    "group_ranks": lambda name: DistributedManager().group_ranks(name),
    "resolve_group": lambda name: DistributedManager().resolve_group(name),
    "destroy_group": lambda name: DistributedManager().destroy_group(name),
    "subgroup": lambda name: DistributedManager.create_process_subgroup("new", 1, name),
    "orthogonal": lambda name: DistributedManager.create_orthogonal_process_group("new", name),
    "mesh": lambda name: DistributedManager().mesh(name),
    "all_gather_v": lambda name: all_gather_v(torch.ones(1), group=name),
    "broadcast_data": lambda name: broadcast_data(1, group=name),
    "fused_all_reduce": lambda name: fused_all_reduce(torch.ones(1), group=name),
    "aggregate_loss": lambda name: aggregate_loss(1.0, group=name),
    "on_rank": lambda name: on_rank(0, group=name)(lambda: None)(),
}


@ranks(1, 2)
def test_a_group_must_have_a_name():
    DistributedManager.create_process_subgroup("all", DistributedManager().world_size)
    for place, call in NEW_NAMES.items():
        with pytest.raises(ValueError, match="the name of a group must not be empty, got ''"):
            call("")
        for name in (None, 3, ("a",)) if place != "root" else ():
            with pytest.raises(TypeError, match="the name of a group must be a str, got"):
                call(name)
    assert DistributedManager().group_names == ("all",)


@ranks(1, 2)
def test_an_empty_name_is_that_of_no_group():
    for call in NAMES.values():
        with pytest.raises(UndefinedGroupError, match="'' must be"):
            call("")
    assert DistributedManager().group_size(None) == DistributedManager().world_size


@ranks(1, 2)
def test_a_text_is_no_list_of_names():
    with pytest.raises(TypeError, match="mesh_dim_names must be a sequence of names, got 'ab'"):
        DistributedManager().initialize_mesh((-1, 1), "ab")
    with pytest.raises(TypeError, match="mesh_dim_names must be a sequence of names, got None"):
        DistributedManager().initialize_mesh((-1, 1), None)
    with pytest.raises(TypeError, match="mesh_shape must be a sequence of lengths, got 2"):
        DistributedManager().initialize_mesh(2, ("a",))


# How other code, or the manager, destroys a group that the program still holds.
ENDS = {
    "by the manager": lambda _: DistributedManager().destroy_group("pair"),
    "by torch": dist.destroy_process_group,
    "with the world": lambda _: dist.destroy_process_group(),
}
USES = {
    "all_gather_v": lambda group: all_gather_v(torch.ones(1), group=group),
    "broadcast_data": lambda group: broadcast_data(1, group=group),
    "fused_all_reduce": lambda group: fused_all_reduce(torch.ones(1), group=group),
    "aggregate_loss": lambda group: aggregate_loss(1.0, group=group),
    "on_rank": lambda group: on_rank(0, group=group)(lambda: None)(),
    "resolve_group": lambda group: DistributedManager().resolve_group(group),
}


@pytest.mark.parametrize("end", ENDS)
@ranks(2)
def test_a_group_that_was_destroyed_is_named_as_such(end):
    manager = DistributedManager()
    manager.create_process_subgroup("pair", 2)
    group, foreign = manager.group("pair"), dist.new_group([0, 1])
    manager.resolve_group(foreign)
    ENDS[end](group)
    gone = [group] if end == "by the manager" else [group, "pair"]
    if end == "with the world":
        gone += [foreign, None, "world"]
    for one in gone:
        for use in USES.values():
            with pytest.raises(UndefinedGroupError, match="got one that was destroyed"):
                use(one)
    DistributedManager.cleanup()
