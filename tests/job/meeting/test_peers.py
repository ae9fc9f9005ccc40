"""What follows from the join records of all ranks."""

import dataclasses
import random

import pytest

from distman._job.meeting.peers import JoinRecord, complete, describe_missing, describe_recounted, find_faults

from .join_records import join_record


def on_gpus(rank, visible, **changes):
    return join_record(rank, backend="cuda", device_type="cuda", visible=tuple(visible), **changes)


def test_a_sound_job_has_no_faults():
    assert find_faults([join_record(0), join_record(1)], 2) == []


def test_two_processes_of_one_rank_are_named_with_pid_and_host():
    (fault,) = find_faults([join_record(0, 3), join_record(1, 3), join_record(1, 3, pid=7, host="n2")], 3)
    assert "rank 1 must be one process, got 2: pid 101 on n1 (train.py, started " in fault
    assert "), pid 7 on n2 (train.py, started " in fault
    assert "give each its own MASTER_PORT" in fault


@pytest.mark.parametrize("visible", [(), ("gpu",)])
def test_many_ranks_of_one_host_are_not_compared_with_each_other(visible, monkeypatch):
    monkeypatch.setattr(JoinRecord, "__eq__", lambda *_: pytest.fail("a thousand ranks would take minutes"))
    ranks = [join_record(rank, 30, visible=visible, is_sharing_allowed=True) for rank in reversed(range(30))]
    assert find_faults(ranks, 30) == []
    assert [peer.local_rank for peer in complete(ranks)] == [*range(30)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", 3), ("backend", "cuda"), ("distman", "0.2.0"), ("torch", "2.14.0")],
)
def test_unlike_ranks_are_named_with_what_they_have(field, value):
    (fault,) = find_faults([join_record(0), join_record(1, **{field: value})], 2)
    assert fault.startswith(f"{field} must be the same on all ranks")
    assert "rank 0 (n1, pid 100)" in fault
    assert "rank 1 (n1, pid 101)" in fault


def test_patch_versions_of_torch_may_differ():
    assert find_faults([join_record(0), join_record(1, torch="2.13.4+cu130")], 2) == []


def test_two_ranks_on_one_gpu_are_a_fault_unless_allowed():
    shared = [on_gpus(0, ["GPU-a"]), on_gpus(1, ["GPU-a"])]
    (fault,) = find_faults(shared, 2)
    assert "GPU-a on n1 for rank 0 (pid 100), rank 1 (pid 101)" in fault
    assert "DISTMAN_ALLOW_SHARED_GPU=1" in fault
    assert find_faults([dataclasses.replace(one, is_sharing_allowed=True) for one in shared], 2) == []
    assert len(find_faults([dataclasses.replace(shared[0], is_sharing_allowed=True), shared[1]], 2)) == 1


def test_one_gpu_name_on_two_hosts_is_two_gpus():
    assert find_faults([on_gpus(0, ["GPU-0"]), on_gpus(1, ["GPU-0"], host="n2")], 2) == []


def test_more_ranks_than_gpus_names_the_counts():
    ranks = [on_gpus(rank, ["a", "b"], world_size=3) for rank in range(3)]
    (fault,) = find_faults(ranks, 3)
    assert "3 ranks on this host and 2 GPUs" in fault


def test_gpus_follow_the_local_rank():
    peers = complete([on_gpus(0, ["a", "b"]), on_gpus(1, ["a", "b"])])
    assert [(peer.device, peer.device_uuid) for peer in peers] == [("cuda:0", "a"), ("cuda:1", "b")]


def test_one_visible_gpu_is_index_zero_whatever_the_local_rank():
    peers = complete([on_gpus(0, ["a"]), on_gpus(1, ["b"])])
    assert [(peer.local_rank, peer.device) for peer in peers] == [(0, "cuda:0"), (1, "cuda:0")]


@pytest.mark.parametrize("seed", range(20))
def test_gpus_that_are_divided_among_the_ranks_of_a_host_are_used_in_turn(seed):
    """Each part of the GPUs is seen by some of the ranks, at most as many as it has."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    parts = [[f"GPU-{part}-{number}" for number in range(draw.randint(1, 4))] for part in range(draw.randint(2, 4))]
    views = [part for part in parts for _ in range(draw.randint(1, len(part)))]
    draw.shuffle(views)
    told = draw.choice([True, False])
    ranks = [
        on_gpus(rank, view, world_size=len(views), local_rank=rank if told else None) for rank, view in enumerate(views)
    ]
    assert find_faults(ranks, len(ranks)) == []
    used = [(int(peer.device.removeprefix("cuda:")), peer.device_uuid) for peer in complete(ranks)]
    assert all(views[rank][index] == uuid for rank, (index, uuid) in enumerate(used))
    assert len({uuid for _, uuid in used}) == len(views)


@pytest.mark.parametrize("uuids", [["a", "b"], ["", ""]])
def test_a_task_that_has_gpus_of_its_own_takes_the_first(uuids):
    ranks = [on_gpus(rank, uuids, world_size=3, has_own_devices=True, host=f"n{rank}") for rank in range(3)]
    assert [peer.device for peer in complete(ranks)] == ["cuda:0"] * 3
    together = [dataclasses.replace(one, host="n0", visible=(f"{one.rank}", f"{one.rank}b")) for one in ranks]
    assert [peer.device for peer in complete(together)] == ["cuda:0"] * 3


def test_gpus_that_overlap_follow_the_local_rank():
    ranks = [on_gpus(0, ["a"], world_size=3), *(on_gpus(rank, ["a", "b", "c"], world_size=3) for rank in (1, 2))]
    assert [peer.device_uuid for peer in complete(ranks)] == ["a", "b", "c"]


def test_a_named_device_is_taken():
    peers = complete([on_gpus(0, ["a", "b"], device="cuda:1"), on_gpus(1, ["a", "b"], device="cuda:0")])
    assert [(peer.device, peer.device_uuid) for peer in peers] == [("cuda:1", "b"), ("cuda:0", "a")]


def test_place_on_the_host_is_derived_where_the_launcher_is_silent():
    hosts = ["b", "a", "b", "b"]
    peers = complete([join_record(rank, 4, host=host) for rank, host in enumerate(hosts)])
    places = [(p.node_rank, p.num_nodes, p.local_rank, p.local_world_size) for p in peers]
    assert places == [(0, 2, 0, 3), (1, 2, 0, 1), (0, 2, 1, 3), (0, 2, 2, 3)]


def test_hosts_of_one_name_are_told_apart():
    """As machines that are called localhost; containers of one machine have names of their own."""
    named = [("localhost", "a"), ("localhost", "b"), ("localhost", "a"), ("c1", "a")]
    records = [on_gpus(rank, ["0"], host=host, boot_id=boot_id) for rank, (host, boot_id) in enumerate(named)]
    shared = [dataclasses.replace(one, is_sharing_allowed=True) for one in records]
    peers = complete(shared)
    assert [(peer.num_nodes, peer.node_rank, peer.local_rank) for peer in peers] == [
        (3, 0, 0),
        (3, 1, 0),
        (3, 0, 1),
        (3, 2, 0),
    ]
    (fault,) = find_faults([dataclasses.replace(one, world_size=4) for one in records], 4)
    assert "got 0 on localhost for rank 0 (pid 100), rank 2 (pid 102)." in fault


def test_what_the_launcher_says_stays():
    (peer,) = complete([join_record(0, 1, local_rank=2, local_world_size=4, node_rank=1, num_nodes=3)])
    assert (peer.local_rank, peer.local_world_size, peer.node_rank, peer.num_nodes) == (2, 4, 1, 3)


@pytest.mark.parametrize(
    ("hosts", "said", "counted"),
    [
        ("aa", [0, 0], [(0, 2), (1, 2)]),
        ("aaa", [0, None, 1], [(0, 3), (1, 3), (2, 3)]),
        ("abba", [1, 1, 1, 1], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("abab", [0, 1, 0, 0], [(0, 2), (1, 1), (1, 2), (0, 1)]),  # what host b says stays
    ],
    ids=str,
)
def test_local_ranks_that_two_ranks_of_a_host_say_are_counted(hosts, said, counted):
    records = [
        on_gpus(rank, [f"{rank}"], world_size=len(said), host=host, local_rank=local_rank, local_world_size=1)
        for rank, (host, local_rank) in enumerate(zip(hosts, said, strict=True))
    ]
    assert find_faults(records, len(said)) == []
    peers = complete(records)
    assert [(peer.local_rank, peer.local_world_size) for peer in peers] == counted
    assert {peer.device for peer in peers} == {"cuda:0"}
    wrong = [(one, peer) for one, peer in zip(said, peers, strict=True) if one not in (None, peer.local_rank)]
    assert describe_recounted(records[::-1], peers) == ", ".join(f"{one} for {peer}" for one, peer in wrong)


def test_two_nodes_of_a_launcher_on_one_machine_have_local_ranks_of_their_own():
    records = [join_record(rank, 4, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2) for rank in range(4)]
    peers = complete(records)
    assert [(peer.local_rank, peer.local_world_size) for peer in peers] == [(0, 2), (1, 2)] * 2
    assert describe_recounted(records, peers) == ""


def test_a_host_has_room_for_the_local_rank_that_the_launcher_says():
    (peer,) = complete([join_record(0, 1, local_rank=2)])
    assert (peer.local_rank, peer.local_world_size) == (2, 3)


def test_sign_ins_in_any_order_give_peers_in_rank_order():
    assert [peer.rank for peer in complete([join_record(1), join_record(0)])] == [0, 1]


def test_the_missing_are_named_with_their_host_where_known():
    assert describe_missing([join_record(0)], 2, {1: "n7"}) == "rank 1 (expected on n7)"
    assert describe_missing([join_record(1, 4)], 4, {}) == "ranks 0, 2, 3"
    assert describe_missing([join_record(0), join_record(1)], 2, {}) == ""


def test_long_lists_are_cut():
    assert describe_missing([], 1000, {}).endswith("15 and 984 more")
