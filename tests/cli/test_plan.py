"""``distman plan``, against the groups that a job makes and against arrays that list every rank."""

import contextlib
import io
import json
import math
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distman import DistributedManager
from distman._cli import main
from distman._cli.output import shorten_ranks
from distman.testing import ranks
from distman.topology import parse_mesh, parse_tree

from ..test_docs import REPOSITORY, assert_shown

NESTED = "world(data=2, model(spatial=2, channel=1))"


def planned(*arguments):
    """Return what the command prints, run in this process; its exit code is 0."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", *arguments]) == 0
    return printed.getvalue()


def planned_json(world_size, *arguments):
    return json.loads(planned("--world-size", str(world_size), "--json", *arguments))


def ranks_by_name(plan):
    return {group["name"]: (group["group_rank"], tuple(group["ranks"])) for group in plan["groups"]}


@ranks(1, 4)
def test_a_tree_is_planned_as_a_job_makes_it(rank, world_size):
    text = NESTED if world_size == 4 else "world(data=1, model(spatial=1, channel=1))"
    DistributedManager.create_groups_from_config(parse_tree(text))
    manager = DistributedManager()
    made = {name: (manager.group_rank(name), manager.group_ranks(name)) for name in manager.group_names}
    plan = planned_json(world_size, "--tree", text, "--rank", str(rank))
    assert ranks_by_name(plan) == made
    assert {group["name"]: group["size"] for group in plan["groups"]} == {
        name: len(own) for name, (_, own) in made.items()
    }


@ranks(4)
def test_a_mesh_is_planned_as_a_job_makes_it(rank):
    axes = parse_mesh("data=-1,model=2")
    manager = DistributedManager()
    manager.initialize_mesh(tuple(axes.values()), tuple(axes))
    plan = planned_json(4, "--mesh", "data=-1,model=2", "--rank", str(rank))
    assert plan["axes"] == manager.mesh_dims
    assert ranks_by_name(plan) == {name: (manager.group_rank(name), manager.group_ranks(name)) for name in plan["axes"]}


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.data(), st.integers(1, 9))
def test_groups_and_nodes_are_those_of_an_array(shape, data, per_node):
    world_size = math.prod(shape)
    rank = data.draw(st.integers(0, world_size - 1))
    text = "world(data={}, model(spatial={}, channel={}))".format(*shape)
    plan = planned_json(world_size, "--tree", text, "--rank", str(rank), "--ranks-per-node", str(per_node))
    grid = np.arange(world_size).reshape(shape)
    place = np.unravel_index(rank, shape)
    along = {"data": [0], "model": [1, 2], "spatial": [1], "channel": [2]}
    assert [group["name"] for group in plan["groups"]] == list(along)
    for group in plan["groups"]:
        own = grid[tuple(slice(None) if axis in along[group["name"]] else place[axis] for axis in range(3))].ravel()
        rows = np.moveaxis(grid, along[group["name"]], range(-len(along[group["name"]]), 0)).reshape(-1, own.size)
        nodes = [len(set(row // per_node)) for row in rows]
        assert group["ranks"] == own.tolist()
        assert group["group_rank"] == own.tolist().index(rank)
        assert (group["num_groups"], group["size"]) == rows.shape
        assert group["nodes"] == {
            "num_groups": len(nodes),
            "num_on_one_node": nodes.count(1),
            "min_nodes": min(nodes),
            "max_nodes": max(nodes),
        }


@given(st.sets(st.integers(0, 30), min_size=1))
def test_short_ranks_are_those_ranks_unless_there_are_many_runs(chosen):
    text = shorten_ranks(sorted(chosen), most=4)
    read = [range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1) for run in text.split(", ") if run != "..."]
    assert len(read) <= 4
    assert ("..." in text) or {rank for run in read for rank in run} == chosen
    assert {min(chosen), max(chosen)} <= {rank for run in read for rank in run} <= chosen


def test_the_text_shows_the_tree_the_groups_and_the_grid():
    assert planned("--world-size", "8", "--mesh", "data=-1,model=4", "--rank", "6", "--ranks-per-node", "4") == (
        "world      8\n"
        "├── data   2\n"
        "└── model  4\n"
        "\n"
        "group  groups  size  first  second  last\n"
        "data   4       2     0, 4   1, 5    3, 7\n"
        "model  2       4     0-3            4-7\n"
        "\n"
        "On 2 nodes of 4 ranks:\n"
        "data: 4 groups of 2 ranks, each across 2 nodes, one rank on each\n"
        "model: 2 groups of 4 ranks, each within one node\n"
        "\n"
        "The ranks:\n"
        "data  model 0  1  2  3  node\n"
        "0     0        1  2  3  0\n"
        "1     4        5  6  7  1\n"
        "\n"
        "Rank 6 is in:\n"
        "group  index  before  behind  ranks\n"
        "data   1      2       (2)     2, 6\n"
        "model  2      5       7       4-7\n"
    )


def test_a_world_without_groups_is_its_tree():
    assert planned("--world-size", "8", "--tree", "world", "--ranks-per-node", "4") == "world  8\n"


@pytest.mark.parametrize(
    ("mesh", "per_node", "warning"),
    [
        ("data=8,model=4", 6, "groups have 4 ranks, a node has 6. Start a multiple of 4 ranks on each node, or choose"),
        ("model=4,data=8", 4, "groups have 8 ranks, a node has 4. Put 'model' last, whose groups fit into a node."),
        ("data=4,model=8", 3, "groups have 8 ranks, a node has 3. Choose a length that divides 3, so that "),
        ("data=4,model=8", 8, None),
        ("data=32", 4, None),
        ("data=32,model=1", 4, None),
    ],
)
def test_an_innermost_axis_that_crosses_nodes_is_warned_of(mesh, per_node, warning):
    arguments = ["--mesh", mesh, "--ranks-per-node", str(per_node)]
    found, printed = planned_json(32, *arguments)["warnings"], planned("--world-size", "32", *arguments)
    assert len(found) == (warning is not None)
    assert all(warning in one and f"warning: {one}" in printed for one in found)
    assert ("warning" in printed) is bool(found)


def test_a_last_node_with_fewer_ranks_is_told():
    assert "On 3 nodes of 3 ranks, the last one with 2:" in planned(
        "--world-size", "8", "--mesh", "a=8", "--ranks-per-node", "3"
    )


@pytest.mark.parametrize(
    ("mesh", "per_node", "sentence"),
    [
        ("a=-1", 3, "a: 1 group of 20 ranks, across 7 nodes"),
        ("a=10,b=2", 3, "b: 10 groups of 2 ranks, 7 within one node, 3 across 2 nodes"),
        ("a=4,b=5", 6, "b: 4 groups of 5 ranks, 1 within one node, 3 across 2 nodes"),
        ("a=4,b=5", 4, "b: 4 groups of 5 ranks, each across 2 nodes"),
        ("a=2,b=10", 4, "b: 2 groups of 10 ranks, each across 3 nodes"),
        ("a=2,b=10", 7, "b: 2 groups of 10 ranks, each across 2 nodes"),
        ("a=20,b=1", 7, "b: 20 groups of 1 rank, each within one node"),
        ("a=20", 20, "a: 1 group of 20 ranks, within one node"),
    ],
)
def test_a_phrase_says_where_groups_lie(mesh, per_node, sentence):
    assert sentence in planned("--world-size", "20", "--mesh", mesh, "--ranks-per-node", str(per_node)).splitlines()


def test_large_worlds_stay_readable():
    printed = planned("--world-size", "65536", "--mesh", "data=-1,model=8", "--ranks-per-node", "8", "--rank", "65535")
    assert len(printed.splitlines()) < 25
    assert max(map(len, printed.splitlines())) < 100
    assert "data   8       8192  0, 8, 16, ..., 65528  1, 9, 17, ..., 65529  7, 15, 23, ..., 65535" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--tree", "world(data=8, model(a=8, b=8))"], 1, "Set data=16 or a=16 or b=16, or start 512 ranks."),
        (["--tree", "world(data, model=2)"], 1, "every leaf of the tree must have a size, got none for ['data']"),
        (["--tree", "world(data=512, node=2)"], 1, "must not be taken, got 'node'"),
        (["--tree", "node(data=512, model=2)"], 1, "must not be taken, got 'node'"),
        (["--mesh", "world=512,model=2"], 1, "must not be taken, got 'world'"),
        (["--mesh", "data=-1,model=3"], 1, "Start a multiple of 3 ranks"),
        (["--tree", "world(data=1024"], 2, "\n  world(data=1024\n                 ^"),
    ],
)
def test_an_error_is_on_standard_error_alone(arguments, code, error, capsys):
    assert main(["plan", "--world-size", "1024", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("distman plan: ")
    assert error in printed.err


@pytest.mark.parametrize(
    ("world_size", "arguments", "error"),
    [
        ("0", ["--mesh", "a=1"], "--world-size: it must be a whole number of at least 1"),
        ("1000000000", ["--mesh", "a=-1"], "--world-size must be at most 10000000, got 1000000000"),
        ("2", [], "one of the arguments --tree --mesh is required"),
        ("2", ["--mesh", "a=2", "--ranks", "1"], "--ranks"),
        ("2", ["--mesh", "a=2", "--rank", "2"], "--rank must be below the world size 2, got 2"),
        ("2", ["--mesh", "a=2", "--rank", "-1"], "--rank: it must be a whole number of at least 0"),
    ],
)
def test_wrong_usage_ends_with_2(world_size, arguments, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--world-size", world_size, *arguments])
    told = capsys.readouterr().err
    assert "usage: distman plan" in told
    assert error in told


def test_it_imports_neither_torch_nor_numpy_nor_matplotlib():
    command = [sys.executable, "-X", "importtime", "-m", "distman", "plan", "--world-size", "4", "--tree", "w(a=2,b=2)"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in finished.stderr.splitlines()}
    assert "distman" in imported
    assert not imported & {"torch", "numpy", "matplotlib", "mpi4py"}


def test_the_output_on_the_page_of_groups_is_real():
    page = (REPOSITORY / "docs" / "groups.md").read_text(encoding="utf-8")
    ((command, shown),) = re.findall(r"```sh\n(distman plan .*?)\n```\n.*?```text\n(.*?)```", page, re.DOTALL)
    assert_shown(shown, planned(*shlex.split(command.replace("\\\n", ""))[2:]))
