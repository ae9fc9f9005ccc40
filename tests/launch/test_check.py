"""``distman check`` and ``distman bench`` under the real launchers."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from distman._cli.check.proofs import PROOFS, PROOFS_OF_TORCH
from distman._job.meeting import secret
from distman._job.meeting.secret import Source

from .mpi import without_words_of_prrte
from .preloaded import PYTHON
from .processes import marked, poll, start

FAULT = Path(__file__).parent / "scripts" / "check_with_fault.py"
CHECK = ("-m", "distman", "check")
LIMIT = 60
HEADS = ["rank", "host", "pid", "node", "local", "rank", "device", "launcher", "torch", "distman"]
IS_EXACT = f"all {len({**PROOFS, **PROOFS_OF_TORCH})} collectives exact on {{}} ranks, {{}} ({{}})"


def rows_of_ranks(finished):
    head, *rows = finished.stdout.split("\n\n")[0].splitlines()
    assert head.split() == HEADS
    return [row.split() for row in rows]


def test_under_torchrun(preloaded_torchrun, tmp_path):
    finished = preloaded_torchrun.run(*CHECK, "--folder", "results", ranks=2, cwd=made(tmp_path), timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert [row[0] for row in rows_of_ranks(finished)] == ["0", "1"]
    _, speeds, conclusion = finished.stdout.split("\n\n")
    assert re.findall(r"^(\w+) +(8 B|64 KiB) ", speeds, re.MULTILINE) == [
        (operation, size) for operation in ("all_reduce", "p2p") for size in ("8 B", "64 KiB")
    ]
    lines = conclusion.splitlines()
    assert lines[-1] == IS_EXACT.format(2, "1 node", "cpu:gloo")
    assert lines[-2] == f"protected by {Source.KERNEL.value}"
    assert lines[-3] == f"folder {tmp_path}/results: all 2 ranks see it"
    assert lines[-4] == f"folder {tmp_path}: all 2 ranks see it"
    assert lines[-5].startswith("slowest to compute: ")
    assert list(tmp_path.rglob("*")) == [tmp_path / "results"]


def test_under_torchrun_without_a_static_rendezvous(preloaded_torchrun):
    """It and the start say so, whatever the kernel says of the ranks; nothing but the first two lines says the rest."""
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    finished = preloaded_torchrun.run(*CHECK, ranks=2, options=options, timeout=LIMIT)
    assert finished.returncode == 0
    assert finished.stderr == f"{secret.OPEN_AGENTS}\n"
    assert f"warning: {secret.OPEN_AGENTS}" in " ".join(finished.stdout.split())
    assert "protected by" not in finished.stdout


def test_a_job_that_must_be_protected_does_not_start_under_open_agents(preloaded_torchrun):
    options, variables = ("--standalone",), {"DISTMAN_SECRET": "required"}
    finished = preloaded_torchrun.run(*CHECK, ranks=2, options=options, env=variables, timeout=LIMIT)
    assert finished.returncode == 1
    assert "DISTMAN_SECRET must not be 'required' in a job with open agents. " in finished.stderr


def made(folder):
    (folder / "results").mkdir()
    return folder


def test_under_srun(slurm_cluster, tmp_path):
    check = [PYTHON, *CHECK]
    finished = slurm_cluster.srun("-N2", "-n4", "--ntasks-per-node=2", *check, timeout=LIMIT, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert [row[1] for row in rows_of_ranks(finished)] == ["n1", "n1", "n2", "n2"]
    lines = finished.stdout.splitlines()
    assert lines[-1] == IS_EXACT.format(4, "2 nodes", "cpu:gloo")
    assert lines[-2] == "protected by a secret that munge shows to processes of this user only"
    assert [line.partition(":")[0] for line in lines if line.startswith("slowest link")] == [
        "slowest link between hosts",
        "slowest link within a host",
    ]


def test_a_folder_that_another_node_does_not_see(slurm_cluster, tmp_path):
    """Each of the virtual hosts has a /dev/shm of its own."""
    check = [PYTHON, *CHECK, "--json", "--folder", "/dev/shm"]  # noqa: S108 - that is the point
    finished = slurm_cluster.srun("-N2", "-n3", *check, timeout=LIMIT, cwd=tmp_path)
    assert finished.returncode == 1
    (line,) = [line for line in finished.stdout.splitlines() if line]
    answer = json.loads(line)
    assert [peer["host"] for peer in answer["ranks"]] == ["n1", "n1", "n2"]
    assert (answer["wrong_ranks"], answer["is_ok"]) == ([], False)
    assert set(map(tuple, answer["collectives"].values())) == {()}
    here, other = answer["folders"]
    assert (here["path"], here["unseen"], here["problem"]) == (str(tmp_path), [], None)
    assert (other["unseen"], other["hosts"], other["problem"]) == ([2], ["n2"], None)
    (problem,) = answer["problems"]
    assert (
        problem == "--folder must be one that all ranks see, got /dev/shm, which is not that of rank 0 on n2 (rank 2)."
    )
    assert {(link["first"], link["second"]) for link in answer["links"]} == {
        (first, second) for second in range(3) for first in range(second)
    }


def test_under_mpirun(openmpi, tmp_path):
    finished = openmpi.preloaded.run(*CHECK, ranks=2, timeout=LIMIT, cwd=tmp_path)
    assert (finished.returncode, without_words_of_prrte(finished.stderr)) == (0, "")
    assert [row[0] for row in rows_of_ranks(finished)] == ["0", "1"]  # plain text, though it prints to a terminal
    assert finished.stdout.splitlines()[-1] == IS_EXACT.format(2, "1 node", "cpu:gloo")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("wrong", r"WRONG: all_gather_v must be exact, got other values on rank 1 \(\S+, pid \d+\)\."),
        (
            "raise",
            r"WRONG: rank 1 \(\S+, pid \d+\) raised DistmanError: all_gather_v failed on rank 1: ValueError: boom",
        ),
    ],
)
def test_a_collective_that_goes_wrong_on_one_rank(preloaded_torchrun, tmp_path, fault, told):
    finished = preloaded_torchrun.run(FAULT, fault, "check", ranks=2, timeout=LIMIT, cwd=tmp_path)
    assert finished.returncode != 0
    assert re.search(f"^{told}", finished.stdout, re.MULTILINE)
    assert "exact on" not in finished.stdout
    assert ("ValueError: boom" in finished.stderr) is (fault == "raise")


def test_on_one_process(tmp_path):
    with start([PYTHON, *CHECK], cwd=tmp_path) as running:
        finished = running.wait(timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "all 11 collectives exact on 1 rank, 1 node (no process group)" in finished.stdout
    assert "One process: no other rank to talk to." in finished.stdout


def test_a_missing_rank(free_port):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    with start([PYTHON, *CHECK, "--timeout", "1", "--json"], env=env) as running:
        finished = running.wait(timeout=LIMIT)
    assert finished.returncode == 1
    assert finished.stderr.startswith("distman check: 1 of 2 ranks joined")
    assert len(finished.stderr.splitlines()) == 1
    answer = json.loads(finished.stdout)
    assert (answer["world_size"], answer["is_ok"]) == (2, False)
    assert answer["problems"] == [finished.stderr.removeprefix("distman check: ").rstrip()]


@contextlib.contextmanager
def two_ranks(*command, port, cwd):
    """Start two ranks without a launcher, which would end them all; yield the first one."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        first, _ = (
            stack.enter_context(start([PYTHON, *command], env={**env, "RANK": str(rank)}, cwd=cwd)) for rank in range(2)
        )
        yield first


def test_a_rank_that_stands_still_within_a_step_is_named_and_what_was_found_is_told(free_port, tmp_path):
    command = (FAULT, "stop", "check", "--json", "--timeout", "4")
    with two_ranks(*command, port=free_port, cwd=tmp_path) as first:
        finished = first.wait(timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (1, "")
    answer = json.loads(finished.stdout)
    (problem,) = answer["problems"]
    who = r"rank 1 \(\S+, pid \d+\), which does not answer"
    assert re.match(rf"the step 'network' failed: no end on {who}", problem)
    assert len(answer["collectives"]) == 15
    assert "all_reduce" in [speed["operation"] for speed in answer["speeds"]]


def test_ctrl_c_leaves_nothing(preloaded_torchrun, tmp_path):
    with preloaded_torchrun.start(*CHECK, ranks=2, cwd=tmp_path) as running:
        running.wait_for_output("local rank")  # the table of ranks: the measurements begin
        os.kill(running.pid, signal.SIGINT)
        finished = running.wait(timeout=LIMIT)
        assert finished.returncode != 0
        assert poll(lambda: not marked(running.marker), 5.0)
    assert "exact on" not in finished.stdout
    assert "distman/_cli" not in finished.stderr, "the traceback is torchrun's own"
    assert list(tmp_path.iterdir()) == []


def test_bench_under_torchrun(preloaded_torchrun, tmp_path):
    options = ["--max-size", "1k", "--factor", "8", "--rounds", "3"]
    finished = preloaded_torchrun.run("-m", "distman", "bench", *options, ranks=2, timeout=LIMIT, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    head, *rows = finished.stdout.splitlines()
    assert head.split("  ")[0] == "operation"
    operations = ["all_reduce", "all_gather", "all_to_all", "p2p"]
    assert [row.split()[:4] for row in rows] == [
        [operation, *size.split(), "3"] for operation in operations for size in ("8 B", "64 B", "512 B")
    ]
    assert list(tmp_path.iterdir()) == []


def test_bench_keeps_what_was_measured_before_a_rank_failed(free_port, tmp_path):
    options = ["--operations", "all_reduce", "all_to_all", "--max-size", "8", "--rounds", "1", "--json"]
    with two_ranks(FAULT, "raise late", "bench", *options, port=free_port, cwd=tmp_path) as first:
        finished = first.wait(timeout=LIMIT)
    assert finished.returncode == 1
    answer = json.loads(finished.stdout)
    assert (answer["num_ranks"], [one["operation"] for one in answer["measurements"]]) == (2, ["all_reduce"])
    told = r"distman bench: all_to_all of 8 B was not measured: rank 1 \(\S+, pid \d+\) raised ValueError: boom"
    assert re.search(f"^{told}$", finished.stderr, re.MULTILINE)
