"""What ``distman check`` is made of; ``tests/launch/test_check.py`` runs the command."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, collectives
from distman._base import timing
from distman._cli import main
from distman._cli.check import proofs
from distman._cli.check.findings import Findings, as_json, facts, find_slow, problems, warnings
from distman._cli.check.hosts import Interface, RankReport
from distman._cli.check.network import Link, measure_links, plan_rounds, tournament
from distman._cli.check.proofs import PROOFS, PROOFS_OF_TORCH, proofs_for, prove
from distman._cli.check.shared_folder import FolderReport, check_folder
from distman._cli.own_job import explain, gather_reports, hand_out, own_fault
from distman._cli.timing import measure_compute, pass_on
from distman._job.meeting.peers import Peer
from distman._job.meeting.secret import Protection, Source
from distman.testing import ranks


def is_disjoint(pairs):
    members = [rank for pair in pairs for rank in pair]
    return len(members) == len(set(members))


@pytest.mark.parametrize("size", range(1, 10))
def test_in_a_tournament_everyone_meets_everyone_once(size):
    rounds = tournament(range(size))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(size), 2))
    assert all(is_disjoint(pairs) for pairs in rounds)
    assert len(rounds) <= size


@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 17), (17, 1), (32, 8), (64, 4), (1000, 4)])
def test_of_many_ranks_few_rounds_measure_a_part(num_nodes, per_node):
    nodes = [rank // per_node for rank in range(num_nodes * per_node)]
    rounds = plan_rounds(nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert all(is_disjoint(pairs) for pairs in rounds)
    assert len(rounds) <= 34
    assert len(set(pairs)) == len(pairs)
    assert {(rank, rank + 1) for rank in range(len(nodes) - 1)} <= set(pairs)
    between = {(nodes[first], nodes[second]) for first, second in pairs if nodes[first] != nodes[second]}
    if num_nodes <= 32:
        assert between >= set(itertools.combinations(range(num_nodes), 2))
    assert {node for pair in between for node in pair} == set(range(num_nodes if num_nodes > 1 else 0))


def test_ranks_that_alternate_between_nodes_have_leaders_too():
    rounds = plan_rounds([rank % 3 for rank in range(18)])
    assert (0, 2) in [pair for pairs in rounds for pair in pairs]


@pytest.mark.parametrize(
    ("seconds", "margin", "slow"),
    [
        ([], 0, []),
        ([1.0], 0, []),
        ([1.0, 2.9], 0, []),
        ([1.0, 3.1], 0, [1]),
        ([1.0, 1.1, 0.9, 9.0, 30.0], 0, [4, 3]),
        ([1e-6, 1e-6, 1e-4], 1e-3, []),
        ([1e-6, 1e-6, 1e-2], 1e-3, [2]),
    ],
)
def test_slow_is_far_from_the_median_and_noticeably_so(seconds, margin, slow):
    assert find_slow(dict(enumerate(seconds)), margin=margin) == slow


def peers(num_nodes=2, per_node=2):
    return [
        Peer(
            rank,
            rank % per_node,
            per_node,
            rank // per_node,
            num_nodes,
            host,
            "5c9a",
            100 + rank,
            "cpu",
            "",
            "slurm",
            "2",
            "1",
        )
        for rank in range(num_nodes * per_node)
        for host in [f"n{rank // per_node + 1}"]
    ]


BY_MUNGE = Protection(Source.MUNGE, socket="/run/munge/socket")


def found(protection=BY_MUNGE, **more):
    return Findings(peers(), "cpu:gloo", "slurm", protection, wrong={"all_gather_v": [], "barrier": []}, **more)


def test_what_is_in_order_is_said_and_the_last_line_is_about_the_collectives():
    folder = FolderReport("/home/me", None, [], [])
    findings = found(compute=[1e-3, 1e-3, 2e-3, 1e-3], folders=[folder])
    assert facts(findings) == [
        "slowest to compute: rank 2 (n2, pid 102), a matrix product in 2 ms (2.0 times the median)",
        "folder /home/me: all 4 ranks see it",
        "protected by a secret that munge shows to processes of this user only",
        "all 2 collectives exact on 4 ranks, 2 nodes (cpu:gloo)",
    ]
    assert (warnings(findings), problems(findings)) == ([], [])


def test_a_job_that_nothing_protects_is_worth_a_look():
    findings = found(Protection(Source.NONE))
    (warning,) = warnings(findings)
    assert warning.startswith("Nothing keeps other users out of this job: it may run on several hosts")
    assert not any("protected" in line for line in facts(findings))
    assert as_json(findings)["protected_by"] is None


def test_the_secret_itself_is_nowhere_in_what_was_found():
    secret = b"0123456789abcdef" * 2
    findings = found(Protection(Source.VARIABLE, secret))
    assert as_json(findings)["protected_by"] == "the secret in DISTMAN_SECRET"
    assert secret.decode() not in f"{findings} {as_json(findings)} {facts(findings)}"


def test_links_between_hosts_are_not_compared_with_those_within():
    links = [Link(0, 1, 1e-6, 1e-5), Link(2, 3, 1e-6, 1e-5)]
    links += [Link(first, second, 1e-4, 1e-2) for first in (0, 1) for second in (2, 3)]
    assert warnings(found(links=links)) == []
    links[-1] = Link(1, 3, 1e-4, 0.2)
    (warning,) = warnings(found(links=links))
    assert warning == "rank 1 (n1) to rank 3 (n2) is slow: 200 ms (20.0 times the median) for 1 MiB."
    assert facts(found(links=links))[-3].startswith("slowest link between hosts: rank 1 (n1) to rank 3 (n2), 8 B in ")


ETH = Interface("eth0", is_up=True, speed=1_000, mtu=1500)


def reports(**unlike):
    """Return what four ranks say; of rank 3 something is unlike."""
    alike = RankReport(cores=[0, 1], num_cores=2, python="3.12", used=ETH, others=[], told=[], problems=[])
    return [alike, alike, alike, dataclasses.replace(alike, **unlike)]


@pytest.mark.parametrize(
    ("unlike", "told"),
    [
        (
            {"others": [Interface("ib0", is_up=True, speed=200_000, mtu=2044)]},
            "gloo uses eth0 (1 Gbit/s, MTU 1500) on n2, which also has ib0 (200 Gbit/s, MTU 2044). If all hosts have "
            "that, set GLOO_SOCKET_IFNAME=ib0, and NCCL_SOCKET_IFNAME for GPUs.",
        ),
        (
            {"used": Interface("eth0", is_up=True, speed=1_000, mtu=9000)},
            "the largest packet (MTU) differs: 1500 on n1; 9000 on n2. Large messages may then hang; let it be "
            "the same.",
        ),
        (
            {"python": "3.11"},
            "the ranks have unlike versions of Python: 3.12 on n1, n2; 3.11 on n2. Install one on all hosts.",
        ),
        (
            {
                "others": [
                    Interface("eth1", is_up=True, speed=1_000, mtu=1500),
                    Interface("ppp0", is_up=True, speed=0, mtu=1500),
                ]
            },
            None,
        ),
        ({"used": None}, None),
        ({"cores": [0]}, None),
    ],
)
def test_what_is_unlike_on_a_host_is_told(unlike, told):
    assert warnings(found(hosts=reports(**unlike))) == ([told] if told else [])


def test_what_is_wrong_with_a_host_is_an_error():
    findings = found(hosts=reports(problems=["has no 256 MiB of memory left"]))
    assert problems(findings) == ["n2 has no 256 MiB of memory left."]
    assert facts(findings)[0] == "gloo uses eth0 (1 Gbit/s, MTU 1500) on n1, n2"


@pytest.mark.parametrize(
    ("link", "told"),
    [
        (Link(0, 2, 1e-4, 0.08), []),
        (Link(0, 2, 1e-4, 0.09), ["93 of 1,000 Mbit/s for 1 MiB"]),
        (Link(0, 2, 0.02, 0.01), ["20 ms for 8 B"]),
        (Link(0, 2, 1e-4, 0.01), []),
        (Link(0, 1, 1e-4, 0.09), []),
    ],
)
def test_a_link_between_hosts_is_slow_by_itself(link, told):
    slow = [f"rank 0 (n1) to rank 2 (n2) is slow: {words}." for words in told]
    assert warnings(found(links=[link], hosts=reports())) == slow


def test_a_rank_whose_links_are_all_slow_is_named():
    slow = [Link(first, 3, 1e-4, 0.04) for first in range(3)]
    told = warnings(found(links=[Link(0, 1, 1e-4, 1e-3), *[Link(first, 2, 1e-4, 1e-3) for first in (0, 1)], *slow]))
    assert told[-1] == "rank 3 (n2, pid 103) is at one end of all 2 slow links."


def test_a_rank_that_computes_slowly_is_named():
    (warning,) = warnings(found(compute=[0.01, 0.01, 0.01, 0.1]))
    assert warning == "rank 3 (n2, pid 103) computes slowly: 100 ms (10.0 times the median) for a matrix product."


def test_a_folder_that_was_named_must_be_shared_and_the_working_directory_need_not():
    unseen = FolderReport("/here", None, [2, 3], ["n2"])
    findings = found(folders=[unseen])
    assert problems(findings) == []
    assert warnings(findings)[0].startswith("the working directory is not shared: ")
    (problem,) = problems(found(folders=[unseen, unseen]))
    assert problem.endswith("/here, which is not that of rank 0 on n2 (ranks 2-3).")


def test_wrong_collectives_and_an_early_end_are_problems():
    findings = found(error="rank 1 died")
    findings.wrong["barrier"] = [3]
    assert problems(findings) == [
        "barrier must be exact, got other values on rank 3 (n2, pid 103).",
        "rank 1 died",
    ]
    assert not any("exact" in line for line in facts(findings))
    answer = as_json(findings)
    assert (answer["wrong_ranks"], answer["is_ok"]) == ([3], False)


@ranks(1, 2, 3, 4)
def test_every_collective_is_exact(world_size):
    manager = DistributedManager()
    proofs = proofs_for(manager)
    assert {name: prove(name, proof, manager) for name, proof in proofs.items()} == dict.fromkeys(proofs, True)
    assert set(proofs) == {*PROOFS, *(PROOFS_OF_TORCH if world_size > 1 else ())}


def test_every_public_collective_has_a_proof():
    assert set(PROOFS) == set(collectives.__all__) - {"FusedWork", "GroupLike", "broadcast_if_ddp"}


def plus_one(collective):
    def call(*args, **kwargs):
        result = collective(*args, **kwargs)
        return {name: one + 1 for name, one in result.items()} if isinstance(result, dict) else result + 1

    return call


@ranks(2, 3)
def test_a_barrier_that_does_not_wait_is_seen(monkeypatch, rank, world_size):
    monkeypatch.setattr(timing, "CHECK_LATE", 0.5)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert prove("barrier", PROOFS_OF_TORCH["barrier"], DistributedManager()) is (rank == world_size - 1)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "module", "function"), [("all_reduce", dist, "all_reduce"), ("all_gather", proofs, "all_gather_single")]
)
def test_a_wrong_end_of_large_messages_is_seen(monkeypatch, name, module, function):
    monkeypatch.setattr(module, function, spoils_large(getattr(module, function)))
    assert not prove(name, PROOFS_OF_TORCH[name], DistributedManager())


def spoils_large(collective):
    def call(result, *args):
        collective(result, *args)
        if len(result) > 100_000:
            result[-1] += 1

    return call


@ranks(2)
def test_a_wrong_end_of_large_messages_around_the_ring_is_seen(monkeypatch):
    monkeypatch.setattr(proofs, "pass_on", spoils_large_received)
    assert not prove("send and recv", PROOFS_OF_TORCH["send and recv"], DistributedManager())


def spoils_large_received(sent, received, manager):
    pass_on(sent, received, manager)
    if len(received) > 100_000:
        received[-1] += 1


@ranks(2)
def test_tensors_that_come_back_in_another_order_are_seen(monkeypatch):
    fused = collectives.fused_all_reduce
    monkeypatch.setattr(
        collectives, "fused_all_reduce", lambda named: {name: one.flip(0) for name, one in fused(named).items()}
    )
    assert not prove("fused_all_reduce", PROOFS["fused_all_reduce"], DistributedManager())


TENSORS = sorted(name for name in PROOFS if "objects" not in name and name != "broadcast_data")


@ranks(2)
def test_another_value_on_one_rank_is_seen_there(monkeypatch, rank):
    manager = DistributedManager()
    for name in TENSORS:
        if rank == 1:
            monkeypatch.setattr(collectives, name, plus_one(getattr(collectives, name)))
        assert prove(name, PROOFS[name], manager) is (rank != 1)


@ranks(1, 3)
def test_reports_of_all_ranks_are_on_rank_zero(rank, world_size):
    for _ in range(2):
        reports = gather_reports(DistributedManager(), "the weather", (rank, "fine"), tuple[int, str])
        assert reports == ([(one, "fine") for one in range(world_size)] if rank == 0 else None)


@ranks(1, 3)
def test_what_rank_zero_says_is_on_all_ranks(rank):
    for _ in range(2):
        assert hand_out(DistributedManager(), "the weather", (rank, "fine"), tuple[int, str]) == (0, "fine")


GLOO = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@ranks(2)
def test_an_error_of_a_connection_is_not_the_rank_s_own_and_any_other_is(rank):
    manager = DistributedManager()
    told = explain(RuntimeError(GLOO), "the step 'links'", manager)
    assert told == f"the step 'links' failed: {GLOO}"
    assert explain(ValueError("boom"), "the step 'links'", manager) is None
    assert own_fault(ValueError("boom"), manager) == f"{manager.roll_call[rank]} raised ValueError: boom"


def test_a_folder_without_a_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "--folder", ""])
    assert ended.value.code == 2
    assert "argument --folder: it must be a name, got ''" in capsys.readouterr().err


@ranks(2, 3)
def test_links_are_those_of_all_pairs(rank, world_size):
    links = measure_links(DistributedManager())
    if rank:
        assert links is None
    else:
        pairs = sorted((link.first, link.second) for link in links)
        assert pairs == list(itertools.combinations(range(world_size), 2))
        assert all(min(link.latency, link.seconds) > 0 for link in links)


@ranks(1, 3)
def test_a_folder_of_this_machine_is_shared_and_nothing_is_left(tmp_path, rank):
    manager = DistributedManager()
    report = check_folder(tmp_path, manager)
    missing = check_folder(tmp_path / "missing", manager)
    manager.barrier()
    assert list(tmp_path.iterdir()) == []
    if rank:
        assert report is missing is None
    else:
        assert report == FolderReport(str(tmp_path), None, [], [])
        assert (missing.problem, missing.is_shared) == ("FileNotFoundError: No such file or directory", False)


def test_the_time_of_a_matrix_product_is_measured():
    assert measure_compute(torch.device("cpu"), allowed_seconds=0.0) > 0
