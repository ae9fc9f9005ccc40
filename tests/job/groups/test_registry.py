"""Groups and meshes on real ranks: who is in them, what happens when ranks disagree, and what is left behind."""

import contextlib
import functools
import gc
import logging
import os
import re
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from distman import (
    BarrierTimeoutError,
    DistmanError,
    DistributedManager,
    PlanMismatchError,
    ProcessGroupConfig,
    ProcessGroupNode,
    RankFailedError,
    UndefinedGroupError,
)
from distman._base.process_state import reset
from distman._coordination.consensus import Consensus
from distman._job.groups import registry
from distman.decorators import on_rank
from distman.testing import ranks
from distman.topology import parse_tree

SOON = 10  # seconds within which all ranks hear of a disagreement
NUM_ROUNDS = 12
NUM_WARM_UPS = 5
IN_BLOCKS = ("n1", "n1", "n2", "n2")
SCATTERED = ("n1", "n2", "n1", "n2")


def members(group):
    """Return the ranks that answer in a group, as an all_reduce finds them."""
    answers = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(answers, group=group)
    return tuple(rank for rank in range(dist.get_world_size()) if answers.item() >> rank & 1)


def check(name, expected):
    """Check a group by everything that is known of it, and by who answers in it."""
    manager, expected = DistributedManager(), tuple(map(int, expected))
    group = manager.group(name)
    assert members(group) == expected
    assert manager.group_ranks(name) == expected == tuple(dist.get_process_group_ranks(group))
    assert manager.group_size(name) == len(expected) == dist.get_world_size(group)
    assert manager.group_rank(name) == expected.index(manager.rank) == dist.get_rank(group)
    assert manager.group_name(group) == name


def block(size, rank):
    start = rank // size * size
    return range(start, start + size)


def tree(**leaf_sizes):
    """Return the tree everyone -> (data, model -> (spatial, channel))."""
    config = ProcessGroupConfig(ProcessGroupNode("everyone"))
    for name, parent in (("data", "everyone"), ("model", "everyone"), ("spatial", "model"), ("channel", "model")):
        config.add_node(ProcessGroupNode(name), parent)
    config.set_leaf_group_sizes(leaf_sizes)
    return config


def start_on(hosts, rank, monkeypatch):
    """Initialize the manager as if the ranks ran on these hosts."""
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[rank])
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    return DistributedManager.initialize()


@contextlib.contextmanager
def logged(level=logging.WARNING):
    """Collect what distman logs from here on."""
    messages, handler, logger = [], logging.Handler(), logging.getLogger("distman")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def num_open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - one descriptor, closed at once


@pytest.fixture
def lone_manager():
    reset()
    yield DistributedManager.initialize(device="cpu")
    reset()


# Groups, one way after the other


@ranks(1, 4)
def test_subgroups_are_blocks_of_consecutive_ranks(rank, world_size):
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for size in sizes:
        DistributedManager.create_process_subgroup(f"by {size}", size)
        check(f"by {size}", block(size, rank))
    assert DistributedManager().group_names == tuple(f"by {size}" for size in sizes)


@ranks(4)
def test_subgroups_of_a_parent_stay_inside_it(rank):
    DistributedManager.create_process_subgroup("half", 2)
    DistributedManager.create_process_subgroup("one", 1, "half")
    DistributedManager.create_process_subgroup("same", 2, "half")
    check("one", [rank])
    check("same", block(2, rank))
    DistributedManager.create_orthogonal_process_group("across", "half")
    DistributedManager.create_process_subgroup("across again", 2, group_name="across")
    check("across again", [rank % 2, rank % 2 + 2])


@ranks(1, 4)
def test_orthogonal_groups_hold_the_ith_ranks_of_all_blocks(rank, world_size):
    for size in (size for size in range(1, world_size + 1) if world_size % size == 0):
        DistributedManager.create_process_subgroup(f"by {size}", size)
        DistributedManager.create_orthogonal_process_group(f"across {size}", f"by {size}")
        check(f"across {size}", range(rank % size, world_size, size))


@ranks(1, 3, 4)
def test_a_node_gives_its_groups_at_once_and_the_orthogonal_ones_when_used(rank, world_size):
    manager = DistributedManager()
    size = 2 if world_size % 2 == 0 else world_size
    orthogonal = DistributedManager.create_group_from_node(ProcessGroupNode("model", size))
    assert manager.group_names == ("model",)
    check("model", block(size, rank))
    inner = DistributedManager.create_group_from_node(ProcessGroupNode("inner", size), parent="model")
    assert (manager.group_names, inner == orthogonal) == (("model", "inner"), False)
    assert manager.group_size(orthogonal) == world_size // size
    check(orthogonal, range(rank % size, world_size, size))
    DistributedManager.create_process_subgroup("below", 1, orthogonal)
    check("below", [rank])


@ranks(1, 3, 4)
def test_a_tree_gives_the_groups_of_all_its_nodes(rank, world_size):
    manager = DistributedManager()
    shape = {1: (1, 1, 1), 3: (1, 3, 1), 4: (2, 1, 2)}[world_size]
    DistributedManager.create_groups_from_config(tree(**dict(zip(("data", "spatial", "channel"), shape, strict=True))))
    assert manager.group_names == ("data", "model", "spatial", "channel")
    world = np.arange(world_size).reshape(shape)
    data, spatial, channel = np.unravel_index(rank, shape)
    check("data", world[:, spatial, channel])
    check("model", world[data].ravel())
    check("spatial", world[data, :, channel])
    check("channel", world[data, spatial])
    assert manager.group("everyone") is dist.group.WORLD
    assert manager.group_ranks("everyone") == tuple(range(world_size))


@ranks(1, 3, 4)
def test_a_mesh_gives_a_group_per_axis(rank, world_size):
    manager = DistributedManager()
    assert (manager.global_mesh, manager.mesh_dims, manager.mesh_names()) == (None, {}, ())
    model = 2 if world_size % 2 == 0 else 1
    mesh = manager.initialize_mesh((-1, model), ("data", "model"))
    world = np.arange(world_size).reshape(-1, model)
    check("data", world[:, rank % model])
    check("model", world[rank // model])
    assert mesh is manager.global_mesh is manager.mesh()
    assert mesh.mesh.tolist() == world.tolist()
    assert manager.mesh_dims == {"data": world_size // model, "model": model}
    assert (manager.mesh_names(), manager.mesh_sizes()) == (("data", "model"), (world_size // model, model))
    for name, row in (("data", world[:, rank % model]), ("model", world[rank // model])):
        part = manager.mesh(name)
        assert part.mesh.tolist() == row.tolist()
        assert part.get_group() is mesh.get_group(name) is manager.group(name) is manager.get_mesh_group(part)
        assert part.get_local_rank() == manager.group_rank(name)
    assert manager.get_mesh_group(mesh) is dist.group.WORLD
    with pytest.raises(ValueError, match="a job must have one mesh"):
        manager.initialize_mesh((world_size,), ("other",))


@ranks(4)
def test_parts_of_a_mesh_along_several_axes_have_a_group_made_once(rank):
    manager = DistributedManager()
    manager.initialize_mesh((2, 2, 1), ("data", "spatial", "channel"))
    part = manager.mesh(("spatial", "channel"))
    assert part.mesh.flatten().tolist() == list(block(2, rank))
    group = manager.get_mesh_group(part)
    assert members(group) == tuple(block(2, rank))
    assert manager.get_mesh_group(manager.mesh(["spatial", "channel"])) is group
    assert members(manager.get_mesh_group(manager.mesh(("data", "spatial")))) == (0, 1, 2, 3)
    assert members(manager.get_mesh_group(manager.mesh(("data", "channel")))) == (rank % 2, rank % 2 + 2)


@ranks(2)
def test_unknown_axes_are_named():
    manager = DistributedManager()
    with pytest.raises(UndefinedGroupError, match="'model' must be an axis of the mesh, known are none"):
        manager.mesh("model")
    with pytest.raises(UndefinedGroupError):
        manager.mesh()
    manager.initialize_mesh((2, 1), ("data", "model"))
    with pytest.raises(UndefinedGroupError, match=r"known are 'data', 'model'\. Did you mean 'model'\?"):
        manager.mesh("modle")
    foreign = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    with pytest.raises(UndefinedGroupError, match="'other' must be an axis of the mesh"):
        manager.get_mesh_group(foreign)


@ranks(4)
def test_a_mesh_that_only_has_the_names_of_the_jobs_mesh_is_refused():
    manager = DistributedManager()
    mesh = manager.initialize_mesh((2, 2, 1), ("data", "model", "spatial"))
    for shape, names, part in (
        ((4,), ("data",), "data"),
        ((4,), None, None),
        ((2, 2), ("model", "data"), "data"),
        ((4, 1), ("data", "model"), "model"),
        ((2, 1, 2), ("spatial", "data", "model"), ("spatial", "model")),
    ):
        foreign = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        foreign = foreign[part] if part else foreign
        ranks_there = re.escape(str(foreign.mesh.tolist()))
        with pytest.raises(UndefinedGroupError, match=rf"got .* of ranks {ranks_there}\. Pass"):
            manager.get_mesh_group(foreign)
    for own in ("data", "model", "spatial"):
        assert manager.get_mesh_group(mesh[own]) is manager.group(own)


@ranks(2)
def test_groups_can_be_made_on_the_class_and_on_an_instance():
    manager = DistributedManager()
    DistributedManager.create_process_subgroup("one", 1)
    manager.create_process_subgroup("two", 2)
    DistributedManager.create_orthogonal_process_group("across one", "one")
    manager.create_orthogonal_process_group("across two", "two")
    manager.create_group_from_node(ProcessGroupNode("three", 1))
    manager.create_groups_from_config(tree(data=2, spatial=1, channel=1))
    assert manager.group_names == DistributedManager().group_names
    assert manager.group_names[:5] == ("one", "two", "across one", "across two", "three")


def test_groups_cannot_be_made_too_early():
    reset()
    with pytest.raises(RuntimeError, match=r"Call DistributedManager\.initialize\(\) once"):
        DistributedManager.create_process_subgroup("model", 1)


# One process without a launcher


def test_one_process_has_groups_of_one(lone_manager):
    DistributedManager.create_process_subgroup("model", 1)
    DistributedManager.create_orthogonal_process_group("data", "model")
    orthogonal = DistributedManager.create_group_from_node(ProcessGroupNode("spatial", 1), "model")
    for name in (None, "world", "model", "data", "spatial", orthogonal, "node", "leaders"):
        assert lone_manager.group(name) is None
        assert (lone_manager.group_size(name), lone_manager.group_rank(name)) == (1, 0)
        assert lone_manager.group_ranks(name) == (0,)
        group = lone_manager.resolve_group(name)
        assert (group.ranks, group.rank, group.size, group.process_group) == ((0,), 0, 1, None)
    lone_manager.destroy_group("model")
    assert "model" not in lone_manager.group_names
    assert not dist.is_initialized()


def test_one_process_has_the_groups_of_a_tree(lone_manager):
    DistributedManager.create_groups_from_config(tree(data=1, spatial=1, channel=1))
    assert lone_manager.group_names == ("data", "model", "spatial", "channel")
    assert (lone_manager.group("model"), lone_manager.group_size("model")) == (None, 1)
    assert lone_manager.group_size("everyone") == 1
    with pytest.raises(ValueError, match="world size 1"):
        DistributedManager.create_groups_from_config(tree(data=2, spatial=1, channel=1))


def test_one_process_has_a_mesh_and_parts_of_it(lone_manager):
    mesh = lone_manager.initialize_mesh((1, -1), ("data", "model"))
    assert (mesh.mesh.tolist(), mesh.mesh_dim_names) == ([[0]], ("data", "model"))
    assert lone_manager.mesh_dims == {"data": 1, "model": 1}
    assert lone_manager.group("model") is None
    assert lone_manager.get_mesh_group(mesh) is None
    for name in ("data", "model"):
        part = lone_manager.mesh(name)
        assert (part.mesh.tolist(), part.mesh_dim_names) == ([0], (name,))
        assert lone_manager.get_mesh_group(part) is None
    assert not dist.is_initialized()


# Ranks that disagree


@ranks(2, 4)
def test_ranks_that_plan_differently_all_see_both_plans(rank, world_size):
    started = time.monotonic()
    error = failure_of_rank_one() if rank == 1 else failure_of_others(world_size)
    assert time.monotonic() - started < SOON
    text = str(error)
    assert f"model: {list(range(world_size))}" in text
    assert "model: [0] [1]" in text
    assert len(set(re.findall(r"test_registry\.py:\d+", text))) == 2
    assert re.search(r"rank 1 \(\S+, pid \d+\) asks for", text)
    check_that_nothing_is_left("model")


def failure_of_rank_one():
    with pytest.raises(PlanMismatchError) as caught:
        DistributedManager.create_process_subgroup("model", 1)
    return caught.value


def failure_of_others(world_size):
    with pytest.raises(PlanMismatchError) as caught:
        DistributedManager.create_process_subgroup("model", world_size)
    return caught.value


@ranks(4)
def test_ranks_that_make_groups_in_different_order_all_see_both_plans(rank):
    first, second = ("data", "model") if rank % 2 else ("model", "data")
    started = time.monotonic()
    with pytest.raises(PlanMismatchError, match="in the same order") as caught:
        DistributedManager.create_process_subgroup(first, 2)
    with pytest.raises(PlanMismatchError, match="in the same order"):
        DistributedManager.create_process_subgroup(second, 2)
    assert time.monotonic() - started < SOON
    assert "data: [0, 1]" in str(caught.value)
    assert "model: [0, 1]" in str(caught.value)
    check_that_nothing_is_left("data")
    check_that_nothing_is_left("model")


@ranks(3)
def test_three_opinions_are_an_error_on_all_three(rank):
    with pytest.raises(PlanMismatchError):
        DistributedManager.create_process_subgroup(f"name {rank}", 3)
    check_that_nothing_is_left("name 0")


@ranks(4)
def test_trees_and_meshes_are_compared_as_well(rank):
    with pytest.raises(PlanMismatchError, match="channel: "):
        DistributedManager.create_groups_from_config(
            tree(data=2, spatial=2, channel=1) if rank == 3 else tree(data=2, spatial=1, channel=2)
        )
    for name in ("data", "model", "spatial", "channel", "everyone"):
        with pytest.raises(UndefinedGroupError):
            DistributedManager().group(name)
    with pytest.raises(PlanMismatchError, match=r"data: \[0, 1, 2, 3\]"):
        DistributedManager().initialize_mesh((4, 1) if rank == 0 else (2, 2), ("data", "model"))
    assert DistributedManager().global_mesh is None
    check_that_nothing_is_left("data")
    DistributedManager().destroy_group("data")
    DistributedManager().initialize_mesh((2, 2), ("data", "model"))
    check("model", block(2, rank))


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (parse_tree("world(a=2, b=1)"), parse_tree("everyone(a=2, b=1)"), "everyone: a=2 x b=1"),
        (parse_tree("world"), parse_tree("everyone"), "everyone: "),
        (parse_tree("everyone(a=2, b=1)"), ((2, 1), ("a", "b")), "world: a=2 x b=1"),
        (((2, 1), ("a", "b")), ((1, 2), ("b", "a")), "world: b=1 x a=2"),
        (((2, 1, 1), ("a", "b", "c")), ((-1, 1, 1), ("a", "c", "b")), "world: a=2 x c=1 x b=1"),
    ],
    ids=str,
)
@ranks(2)
def test_the_order_of_axes_and_the_name_of_the_root_are_compared(rank, one, other, shown):
    manager = DistributedManager()
    mine = one if rank == 0 else other
    is_tree = isinstance(mine, ProcessGroupConfig)
    make = functools.partial(
        *((manager.create_groups_from_config, mine) if is_tree else (manager.initialize_mesh, *mine))
    )
    with pytest.raises(PlanMismatchError, match=re.escape(shown)):
        make()
    assert (manager.group_names, manager.global_mesh) == ((), None)


@ranks(4)
def test_a_mesh_and_a_tree_of_leaves_are_one_plan(rank):
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    config.add_node(ProcessGroupNode("data", 2), "world")
    config.add_node(ProcessGroupNode("model", 2), "world")
    if rank == 2:
        DistributedManager().initialize_mesh((2, 2), ("data", "model"))
    else:
        DistributedManager.create_groups_from_config(config)
    check("data", [rank % 2, rank % 2 + 2])
    check("model", block(2, rank))


@ranks(3, manager=False)
def test_a_rank_that_makes_no_groups_is_named(rank):
    DistributedManager.initialize(rendezvous_timeout=1.0)
    if rank != 1:
        with pytest.raises(BarrierTimeoutError, match=r"did not come: rank 1 \(.*, pid \d+\)"):
            DistributedManager.create_process_subgroup("model", 3)
        assert DistributedManager().group_names == ()


def fail_on(failing, rank, monkeypatch, after=0):
    """Let the making of groups fail on one rank, after some that succeed."""
    make, calls = registry.make_group, iter(range(100))

    def fail(*arguments, **options):
        if next(calls) >= after:
            raise OSError("too many open files")
        return make(*arguments, **options)

    if rank == failing:
        monkeypatch.setattr(registry, "make_group", fail)


@pytest.mark.parametrize("size", [1, 2])
@ranks(2, timeout=30)
def test_a_rank_that_cannot_make_its_group_is_an_error_on_all(rank, size, monkeypatch):
    started = time.monotonic()
    with monkeypatch.context() as broken:
        fail_on(1, rank, broken)
        with pytest.raises(OSError if rank == 1 else RankFailedError, match="too many open files") as caught:
            DistributedManager.create_process_subgroup("model", size)
    assert time.monotonic() - started < SOON
    if rank == 0:
        assert (caught.value.rank, caught.value.error_type) == (1, "OSError")
    check_that_nothing_is_left("model")


@ranks(3)
def test_groups_that_were_made_before_one_failed_are_unmade(rank, monkeypatch):
    with monkeypatch.context() as broken:
        fail_on(1, rank, broken, after=1)
        with pytest.raises(OSError if rank == 1 else RankFailedError, match="too many open files"):
            DistributedManager().initialize_mesh((3, 1), ("data", "model"))
    assert DistributedManager().global_mesh is None
    for name in ("data", "model"):
        check_that_nothing_is_left(name)


def check_that_nothing_is_left(name):
    """Check that a creation that failed left no trace, by trying again with all ranks of one mind."""
    manager = DistributedManager()
    with pytest.raises(UndefinedGroupError):
        manager.group(name)
    assert name not in manager.group_names
    assert len(_world.pg_map) == 1 + len(manager.group_names)
    assert len(_world.pg_group_ranks) == 1 + len(manager.group_names)
    DistributedManager.create_process_subgroup(name, manager.world_size)
    check(name, range(manager.world_size))


# Names


@ranks(2)
def test_unknown_names_are_errors_that_suggest_one():
    manager = DistributedManager()
    DistributedManager.create_process_subgroup("model", 2)
    asking = (manager.group, manager.group_size, manager.group_rank, manager.group_ranks, manager.resolve_group)
    for ask in (*asking, manager.destroy_group):
        with pytest.raises(UndefinedGroupError, match=r"'modle' must be the name of a group.*Did you mean 'model'\?"):
            ask("modle")
        with pytest.raises(UndefinedGroupError, match="known are 'leaders', 'model', 'node', 'world'"):
            ask("xyz")
    with pytest.raises(UndefinedGroupError, match=r"Did you mean 'model'\?"):
        DistributedManager.create_process_subgroup("inner", 1, "modle")
    with pytest.raises(UndefinedGroupError, match=r"Did you mean 'model'\?"):
        DistributedManager.create_orthogonal_process_group("data", "modle")
    assert manager.group_names == ("model",)


@ranks(2)
def test_names_that_are_taken_are_refused():
    DistributedManager.create_process_subgroup("model", 2)
    orthogonal = DistributedManager.create_group_from_node(ProcessGroupNode("spatial", 2))
    for name in ("model", "spatial", orthogonal, "world", "node", "leaders"):
        with pytest.raises(ValueError, match=f"the name of a group must not be taken, got '{name}'"):
            DistributedManager.create_process_subgroup(name, 1)
        with pytest.raises(ValueError, match=f"got '{name}'"):
            DistributedManager().initialize_mesh((2, 1), ("fresh", name))
    with pytest.raises(ValueError, match="got 'model'"):
        DistributedManager.create_groups_from_config(tree(data=2, spatial=1, channel=1))
    assert DistributedManager().group_names == ("model", "spatial")


@pytest.mark.parametrize("name", ["model", "node", "leaders"])
@ranks(2)
def test_the_root_of_a_tree_takes_no_other_groups_name(name):
    DistributedManager.create_process_subgroup("model", 1)
    config = ProcessGroupConfig(ProcessGroupNode(name))
    config.add_node(ProcessGroupNode("data", 2), name)
    with pytest.raises(ValueError, match=f"the name of a group must not be taken, got '{name}'"):
        DistributedManager.create_groups_from_config(config)
    assert DistributedManager().group_names == ("model",)


@ranks(4)
def test_trees_may_share_the_name_of_the_world():
    for leaf in ("data", "time"):
        config = ProcessGroupConfig(ProcessGroupNode("world", 4))
        config.add_node(ProcessGroupNode(leaf, 4), "world")
        DistributedManager.create_groups_from_config(config)
        check(leaf, range(4))
    config = ProcessGroupConfig(ProcessGroupNode("everyone", 4))
    DistributedManager.create_groups_from_config(config)
    assert DistributedManager().group("everyone") is dist.group.WORLD
    with pytest.raises(ValueError, match="got 'everyone'"):
        DistributedManager.create_process_subgroup("everyone", 4)


@ranks(4)
def test_sizes_that_do_not_fit_are_refused_before_anyone_is_asked():
    with pytest.raises(ValueError, match="divisor of the parent group's size 4, got 3"):
        DistributedManager.create_process_subgroup("model", 3)
    with pytest.raises(ValueError, match="world size 4"):
        DistributedManager.create_groups_from_config(tree(data=2, spatial=3, channel=1))
    with pytest.raises(ValueError, match="world size 4"):
        DistributedManager().initialize_mesh((3, -1), ("data", "model"))
    with pytest.raises(ValueError, match="node 'model' must have a size"):
        DistributedManager.create_group_from_node(ProcessGroupNode("model"))
    check_that_nothing_is_left("model")


@ranks(3)
def test_the_world_has_a_name(rank, world_size):
    manager = DistributedManager()
    assert manager.group() is manager.group("world") is dist.group.WORLD
    assert manager.group_name() == manager.group_name(dist.group.WORLD) == "world"
    assert (manager.group_size(), manager.group_rank()) == (world_size, rank)
    assert manager.group_ranks() == manager.group_ranks("world") == (0, 1, 2)
    assert manager.resolve_group() is manager.resolve_group("world") is manager.resolve_group(dist.group.WORLD)


# Groups of other code


@ranks(4)
def test_groups_of_other_code_are_resolved(rank):
    manager = DistributedManager()
    theirs = [dist.new_group([2, 0]), dist.new_group([1, 3])]
    mine, other = theirs[rank % 2], theirs[1 - rank % 2]
    found = manager.resolve_group(mine)
    assert (found.ranks, found.rank, found.size) == ((rank % 2, rank % 2 + 2), rank // 2, 2)
    assert found.process_group is mine
    assert (found.name, manager.resolve_group(mine)) == ("", found)
    assert members(found.process_group) == found.ranks
    with pytest.raises(ValueError, match=rf"of which rank {rank} is a member"):
        manager.resolve_group(other)
    with pytest.raises(UndefinedGroupError, match="must be a group that the manager made"):
        manager.group_name(mine)
    for wrong in (other, "node"):
        with pytest.raises(UndefinedGroupError, match=f"must be a process group that the manager made, got {wrong!r}"):
            manager.group_name(wrong)


@ranks(2)
def test_groups_of_the_manager_are_resolved_by_name_and_by_what_they_carry():
    manager = DistributedManager()
    DistributedManager.create_process_subgroup("model", 2)
    assert manager.resolve_group("model") == manager.resolve_group(manager.group("model"))
    assert manager.resolve_group("model").name == "model"


# Hosts


@pytest.mark.parametrize(
    "hosts", [IN_BLOCKS, SCATTERED, ("n1",) * 4, ("n1", "n2", "n3", "n4"), ("n2", "n1", "n1", "n1")]
)
@ranks(4, manager=False)
def test_node_and_leaders_follow_the_hosts(rank, hosts, monkeypatch):
    manager = start_on(hosts, rank, monkeypatch)
    neighbours = [other for other in range(4) if hosts[other] == hosts[rank]]
    leaders = sorted({hosts.index(host) for host in hosts})
    assert manager.group_names == ()
    check("node", neighbours)
    assert manager.group_names == ("node",)
    assert (manager.group_ranks("leaders"), manager.group_size("leaders")) == (tuple(leaders), len(leaders))
    if rank in leaders:
        check("leaders", leaders)
        return
    for ask in (manager.group, manager.group_rank, manager.resolve_group):
        with pytest.raises(ValueError, match=rf"got rank {rank}|got {rank}"):
            ask("leaders")


@ranks(4, manager=False)
def test_groups_can_be_made_inside_the_hosts(rank, monkeypatch):
    start_on(SCATTERED, rank, monkeypatch)
    DistributedManager.create_process_subgroup("pair", 2, "node")
    check("pair", [rank % 2, rank % 2 + 2])
    DistributedManager.create_orthogonal_process_group("across hosts", "node")
    check("across hosts", block(2, rank))


@ranks(3, manager=False)
def test_hosts_with_different_numbers_of_ranks_have_no_orthogonal_groups(rank, monkeypatch):
    start_on(("n1", "n1", "n2"), rank, monkeypatch)
    with pytest.raises(ValueError, match=r"groups must be equal in size .*got sizes \[1, 2\]"):
        DistributedManager.create_orthogonal_process_group("across hosts", "node")
    check_that_nothing_is_left("across hosts")


@pytest.mark.parametrize(
    ("hosts", "is_warned"), [(IN_BLOCKS, False), (SCATTERED, True), (("n1", "n2", "n3", "n4"), False)]
)
@ranks(4, manager=False)
def test_the_first_rank_of_a_group_warns_if_it_would_fit_on_a_host_and_crosses_hosts(
    rank, hosts, is_warned, monkeypatch
):
    start_on(hosts, rank, monkeypatch)
    with logged() as messages:
        DistributedManager.create_process_subgroup("model", 2)
    if is_warned and rank % 2 == 0:
        (message,) = messages
        assert "group 'model'" in message
        assert "would fit on one host" in message
        assert f"ranks {[rank, rank + 1]} are on several" in message
    else:
        assert messages == []


@ranks(4, manager=False)
def test_a_mesh_with_one_axis_inside_the_hosts_is_not_warned_of(rank, monkeypatch):
    start_on(IN_BLOCKS, rank, monkeypatch)
    with logged() as messages:
        DistributedManager().initialize_mesh((2, 2), ("data", "model"))
        DistributedManager.create_orthogonal_process_group("across hosts", "model")
    assert messages == []


@ranks(4)
def test_verbose_shows_all_groups_on_one_rank(rank):
    with logged(logging.INFO) as messages:
        DistributedManager.create_process_subgroup("quiet", 2)
        DistributedManager.create_process_subgroup("model", 2, verbose=True)
    assert [message.partition("\n")[2] for message in messages] == ([] if rank else ["model: [0, 1] [2, 3]"])


# Timeouts, and what is left behind


@ranks(4, manager=False)
def test_groups_inherit_the_timeout():
    manager = DistributedManager.initialize(timeout=123.0)
    DistributedManager.create_process_subgroup("model", 2)
    DistributedManager.create_orthogonal_process_group("data", "model")
    manager.initialize_mesh((2, 2), ("rows", "columns"))
    part = manager.get_mesh_group(manager.mesh("rows"))
    for group in (*map(manager.group, ("model", "data", "columns", "node")), part):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=123)


@ranks(2, manager=False)
def test_a_collective_of_a_group_gives_up_after_the_timeout(rank):
    manager = DistributedManager.initialize(timeout=2.0)
    DistributedManager.create_process_subgroup("model", 2)
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            dist.all_reduce(torch.ones(1), group=manager.group("model"))
        assert time.monotonic() - started < SOON


@ranks(2)
def test_making_and_destroying_groups_leaks_no_open_files(world_size):
    manager = DistributedManager()
    for number in range(NUM_WARM_UPS + NUM_ROUNDS):
        DistributedManager.create_process_subgroup("model", world_size)
        assert members(manager.group("model")) == tuple(range(world_size))
        manager.destroy_group("model")
        manager.barrier()
        if number == NUM_WARM_UPS - 1:
            before = num_open_files()
    assert num_open_files() <= before
    assert manager.group_names == ()
    assert len(_world.pg_map) == 1


@ranks(2)
def test_groups_of_other_code_are_not_kept_open():
    manager = DistributedManager()
    for number in range(NUM_WARM_UPS + NUM_ROUNDS):
        group = dist.new_group([0, 1])
        assert manager.resolve_group(group).size == 2
        manager.barrier()  # a rank that is still connecting would see the other's end close
        dist.destroy_process_group(group)
        del group
        manager.barrier()
        if number == NUM_WARM_UPS - 1:
            before = num_open_files()
    assert num_open_files() <= before


@ranks(3)
def test_decisions_leave_nothing_in_the_store(rank):
    manager = DistributedManager()
    store = manager._state.job.rendezvous.store
    consensus = Consensus(manager._state.job.store_group(), 10.0)
    manager.barrier()
    dist.barrier()
    num_keys = store.num_keys()
    for number in range(20):
        consensus.agree(f"plan {number}", "same", "text")
        consensus.require_success(f"plan {number} made", None)
        with pytest.raises(PlanMismatchError):
            DistributedManager.create_process_subgroup(f"name {rank}", 3)
        with pytest.raises(OSError if rank == 1 else RankFailedError):
            consensus.require_success(f"failure {number}", OSError("no") if rank == 1 else None)
        with pytest.raises(PlanMismatchError):
            consensus.compare(f"call {number}", {"shape": str(rank)}, place="here")
    dist.barrier()
    assert store.num_keys() <= num_keys


@ranks(4)
def test_a_destroyed_group_is_forgotten_and_its_name_is_free(rank):
    manager = DistributedManager()
    for size in (2, 4, 1, 2):
        DistributedManager.create_process_subgroup("model", size)
        check("model", block(size, rank))
        group = manager.group("model")
        manager.destroy_group("model")
        with pytest.raises(UndefinedGroupError):
            manager.group("model")
        with pytest.raises(UndefinedGroupError):
            manager.group_name(group)
    assert len(_world.pg_map) == 1


@ranks(4)
def test_a_mesh_goes_with_one_of_its_axes_and_another_one_can_be_made(rank):
    manager = DistributedManager()
    for shape in ((2, 2, 1), (1, 2, 2), (4, 1, 1)):
        names = ("data", "spatial", "channel")
        mesh = manager.initialize_mesh(shape, names)
        row = np.arange(4).reshape(shape[0], -1)[:, rank % (4 // shape[0])]
        assert members(manager.get_mesh_group(manager.mesh("data"))) == tuple(row)
        part = manager.mesh(("spatial", "channel"))
        assert members(manager.get_mesh_group(part)) == tuple(part.mesh.flatten().tolist())
        manager.destroy_group("channel")
        assert (manager.global_mesh, manager.mesh_dims, manager.group_names) == (None, {}, ("data", "spatial"))
        for of_the_mesh in (manager.mesh, lambda: manager.mesh("data"), lambda mesh=mesh: manager.get_mesh_group(mesh)):
            with pytest.raises(UndefinedGroupError):
                of_the_mesh()
        assert members(manager.group("data")) == tuple(row)
        manager.destroy_group("data")
        manager.destroy_group("spatial")
    assert len(_world.pg_map) == 1


@ranks(2, timeout=20)
def test_groups_made_at_first_use_can_be_made_again_after_they_were_destroyed():
    manager = DistributedManager()
    for _ in range(3):
        check("node", [0, 1])
        manager.destroy_group("node")


@ranks(4, timeout=20)
def test_orthogonal_groups_of_a_node_can_be_made_again_after_they_were_destroyed(rank):
    manager = DistributedManager()
    for size in (2, 2, 1):
        orthogonal = DistributedManager.create_group_from_node(ProcessGroupNode("model", size))
        check(orthogonal, range(rank % size, 4, size))
        manager.destroy_group(orthogonal)
        manager.destroy_group("model")


@ranks(2, manager=False)
def test_cleanup_destroys_all_groups_and_a_new_start_can_make_them_again():
    for _ in range(3):
        manager = DistributedManager.initialize()
        DistributedManager.create_process_subgroup("model", 2)
        orthogonal = DistributedManager.create_group_from_node(ProcessGroupNode("inner", 1))
        for name, expected in (("model", [0, 1]), ("node", [0, 1]), (orthogonal, [0, 1])):
            check(name, expected)
        manager.initialize_mesh((2, 1), ("data", "spatial"))
        DistributedManager.cleanup()
        assert len(_world.pg_map) == 1


@ranks(3)
def test_arguments_that_are_wrong_on_one_rank_are_shown_on_all_at_once(rank):
    with pytest.raises(
        PlanMismatchError, match=r"asks for\n  a: \[0\] .*\n.*\n.*asks for\n  an error: size must be a divisor"
    ):
        DistributedManager.create_process_subgroup("a", 1 if rank == 0 else 2)
    with pytest.raises(ValueError, match="size must be a divisor of the parent group's size 3, got 2"):
        DistributedManager.create_process_subgroup("a", 2)
    DistributedManager.create_process_subgroup("a", 3)


@ranks(2)
def test_the_world_cannot_be_destroyed_and_axes_have_an_order():
    manager = DistributedManager()
    manager.initialize_mesh((2, 1), ("a", "b"))
    with pytest.raises(ValueError, match="must not be the world"):
        manager.destroy_group("world")
    with pytest.raises(ValueError, match=r"in the order of the mesh, \('a', 'b'\), got \['b', 'a'\]"):
        manager.mesh(("b", "a"))
    assert manager.mesh(("a", "b")) == manager.global_mesh


@ranks(8)
def test_nodes_made_one_by_one_are_orthogonal_inside_their_parent(rank):
    create = DistributedManager.create_group_from_node
    model = create(ProcessGroupNode("data", 2))
    create(ProcessGroupNode("model", 4), parent=model)
    channel = create(ProcessGroupNode("spatial", 2), parent="model")
    create(ProcessGroupNode("channel", 2), parent=channel)
    manager = DistributedManager()
    assert manager.group_ranks("model") == tuple(range(rank % 2, 8, 2))
    assert manager.group_ranks("spatial") == tuple(sorted((rank, rank ^ 2)))
    assert manager.group_ranks("channel") == tuple(sorted((rank, rank ^ 4)))


@ranks(2)
def test_whatever_a_rank_cannot_plan_is_shown_on_all(rank):
    with pytest.raises(PlanMismatchError, match=r"an error: size must be a divisor of .* got 2\.0"):
        DistributedManager.create_process_subgroup("a", 2.0 if rank else 2)
    with pytest.raises(PlanMismatchError, match="an error: node 'a' must have a size"):
        DistributedManager.create_group_from_node(ProcessGroupNode("a", None if rank else 2))
    DistributedManager.create_group_from_node(ProcessGroupNode("a", 2))
    DistributedManager().destroy_group("a")
    DistributedManager.create_group_from_node(ProcessGroupNode("a", 1))


@ranks(2, manager=False)
def test_a_member_that_comes_too_late_to_the_first_use_is_named_and_told(rank):
    manager = DistributedManager.initialize(rendezvous_timeout=1)
    if rank == 0:
        with pytest.raises(BarrierTimeoutError, match=r"the first use of group node .* did not come: rank 1"):
            manager.group("node")
    manager.barrier(timeout=30)
    if rank == 1:
        with pytest.raises(RankFailedError, match=r"rank 0 .* raised BarrierTimeoutError"):
            manager.group("node")
    manager.barrier(timeout=30)
    check("node", [0, 1])


@ranks(2, timeout=20)
def test_groups_are_not_made_where_only_some_ranks_run(rank):
    manager = DistributedManager()

    @on_rank(0)
    def make_alone():
        for make in (
            lambda: manager.create_process_subgroup("pair", 2),
            lambda: manager.initialize_mesh((2,), ("row",)),
            lambda: manager.group("node"),
        ):
            with pytest.raises(
                DistmanError, match=r"must be called where all its ranks run, got a call within on_rank"
            ):
                make()

    make_alone()
    manager.create_process_subgroup("pair", 2)
    assert manager.group_ranks("pair") == manager.group_ranks("node") == (0, 1)
    assert manager.group_rank("pair") == rank
