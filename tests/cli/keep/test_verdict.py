import pytest

from distman._cli.keep.verdict import Accusation, Ended, Health, HostNote, Notes, judge, waits_for_lost_hosts

HOSTS = {f"n{rank + 1}": HostNote((rank,), oom_kills=3, step="0") for rank in range(4)}
DIED = Accusation(1, "died", "rank 1 (n2, pid 7) died")
SILENT = Accusation(1, "silent", "rank 1 (n2, pid 7) has been silent for 300 s")
RAISED = Accusation(1, "ValueError", "rank 1 (n2, pid 7) raised ValueError: boom")
OTHERS = "".join(f"srun: error: n{rank + 1}: task {rank}: Exited with exit code 76\n" for rank in (0, 2, 3))


def seen_by(hosts, accusation=DIED, *, by_host=HOSTS):
    return Notes(by_host, dict.fromkeys(hosts, accusation), saved=None)


def ended(errors="", *, did_not_end=False):
    return Ended(76, errors, interruption=None, did_not_end=did_not_end)


def healthy(_host):
    return Health(None, oom_kills=3)


def never(host):
    pytest.fail(f"{host} is checked without need")


def killed(how):
    return f"srun: error: n2: task 1: {how}\n{OTHERS}"


def test_a_note_that_is_not_whole_is_none(tmp_path):
    (tmp_path / "host-n1.json").write_text('{"ranks": [0, 1], "oom_kills": 3, "step": "0"}')
    (tmp_path / "host-n2.json").write_text('{"ranks": [2')
    (tmp_path / "failure-n1.json").write_text('{"rank": 1, "kind": "died", "text": "rank 1\\u001b[2J died."}')
    (tmp_path / "failure-n2.json").write_text('{"rank": 1}')
    notes = Notes.read(tmp_path)
    assert notes == Notes({"n1": HostNote((0, 1), 3, "0")}, {"n1": Accusation(1, "died", "rank 1\\x1b[2J died")}, None)
    assert notes.host_of(1) == "n1"


def test_without_a_word_no_host_is_bad():
    verdict = judge(Notes({}, {}, None), ended("srun: error"), never)
    assert (verdict.reason, verdict.bad_hosts) == ("it ended with exit code 76, and no rank wrote down why", set())


def test_an_error_of_the_program_makes_no_host_bad():
    assert judge(seen_by(["n1", "n2", "n3", "n4"], RAISED), ended(), never).bad_hosts == set()


def test_the_host_of_a_silent_rank_is_bad():
    assert judge(seen_by(["n1", "n3", "n4"], SILENT), ended(), never).bad_hosts == {"n2"}


def test_the_host_of_a_rank_that_was_killed_is_bad():
    assert judge(seen_by(["n1", "n3", "n4"]), ended(killed("Killed")), healthy).bad_hosts == {"n2"}


@pytest.mark.parametrize("how", ["Segmentation fault", "Segmentation fault (core dumped)", "Aborted"])
def test_a_rank_that_crashed_makes_no_host_bad(how):
    verdict = judge(seen_by(["n1", "n3", "n4"]), ended(killed(how)), healthy)
    assert verdict.bad_hosts == set()
    assert verdict.reason == f"{DIED.text}. Slurm says: {how.removesuffix(' (core dumped)')}"


def test_lack_of_memory_makes_no_host_bad():
    by_counter = judge(seen_by(["n1", "n3", "n4"]), ended(killed("Killed")), lambda _: Health(None, oom_kills=4))
    by_word = judge(seen_by(["n1", "n3", "n4"]), ended(killed("Out Of Memory")), healthy)
    assert by_counter.bad_hosts == by_word.bad_hosts == set()
    assert by_counter.reason.endswith("Memory ran out on n2")


def test_lack_of_memory_makes_a_host_bad_whose_check_fails():
    sick = Health("computes wrong numbers", oom_kills=4)
    verdict = judge(seen_by(["n1"]), ended(killed("Killed")), lambda _: sick)
    assert (verdict.reason, verdict.bad_hosts) == (f"{DIED.text}. n2 computes wrong numbers", {"n2"})


def test_kills_on_several_hosts_at_once_make_none_bad():
    cancelled = "slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-27T10:24:36 ***\n"
    errors = f"{cancelled}srun: error: n2: task 1: Terminated\nsrun: error: n[3-4]: tasks 2-3: Terminated\n"
    verdict = judge(seen_by(["n1"]), ended(errors), healthy)
    assert verdict.bad_hosts == set()
    assert verdict.reason.endswith("Ranks on n3, n4 ended at the same time")


def test_a_kill_after_which_srun_ends_the_others_makes_its_host_bad():
    cancelled = "slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-27T10:24:36 ***\n"
    errors = f"srun: error: n2: task 1: Killed\n{cancelled}srun: error: n[3-4]: tasks 2-3: Terminated\n"
    assert judge(seen_by(["n1"]), ended(errors), healthy).bad_hosts == {"n2"}


def test_where_srun_ends_the_others_before_they_can_write_its_first_line_says_who_was_killed():
    cancelled = "slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-27T10:24:36 ***\n"
    others = "srun: error: n1: task 0: Terminated\nsrun: error: n[3-4]: tasks 2-3: Terminated\n"
    verdict = judge(seen_by([]), ended(f"srun: error: n2: task 1: Killed\n{cancelled}{others}"), healthy)
    assert (verdict.reason, verdict.bad_hosts) == ("rank 1 on n2 was killed, says srun", {"n2"})
    assert judge(seen_by([]), ended(f"{cancelled}{killed('Killed')}"), healthy).bad_hosts == set()
    at_once = "srun: error: n2: task 1: Killed\nsrun: error: n3: task 2: Killed\nsrun: error: n1: task 0: Killed\n"
    assert judge(seen_by([]), ended(at_once), healthy).bad_hosts == set()


def test_a_host_of_which_slurm_says_nothing_any_more_is_bad_without_a_check():
    assert judge(seen_by(["n1", "n3", "n4"]), ended(OTHERS, did_not_end=True), never).bad_hosts == {"n2"}


def test_the_majority_names_the_host_that_was_cut_off():
    blames_others = Accusation(0, "silent", "rank 0 (n1, pid 6) is on a host that has not answered for 5 s")
    notes = Notes(HOSTS, {"n1": SILENT, "n3": SILENT, "n2": blames_others}, None)
    assert judge(notes, ended(), never).bad_hosts == {"n2"}


def test_of_two_hosts_that_lost_each_other_the_one_that_cannot_be_checked_is_bad():
    blames_first = Accusation(0, "silent", "rank 0 (n1, pid 6) is on a host that has not answered for 5 s")
    notes = Notes({"n1": HOSTS["n1"], "n2": HOSTS["n2"]}, {"n1": SILENT, "n2": blames_first}, None)
    verdict = judge(notes, ended(), lambda host: Health("did not answer within 20 s" if host == "n2" else None, 3))
    assert verdict.bad_hosts == {"n2"}
    assert verdict.reason == f"{blames_first.text}. n2 did not answer within 20 s"
    assert judge(notes, ended(), healthy).bad_hosts == set()


def test_other_ranks_of_the_host_of_a_rank_that_failed_have_their_time():
    two_each = {"n1": HostNote((0, 1), 3, "0"), "n2": HostNote((2, 3), 3, "0")}
    ends = "srun: error: n2: tasks 2-3: Exited with exit code 76\n"
    assert waits_for_lost_hosts(seen_by(["n2"], by_host=two_each), ends)
    assert not waits_for_lost_hosts(seen_by(["n1", "n2"], by_host=two_each), ends)
    assert not waits_for_lost_hosts(seen_by(["n1"], by_host={"n1": two_each["n1"]}), "")


def test_srun_waits_for_lost_hosts_when_all_other_tasks_have_ended():
    notes = seen_by(["n1", "n3", "n4"])
    assert waits_for_lost_hosts(notes, OTHERS)
    assert not waits_for_lost_hosts(notes, OTHERS.splitlines()[0])
    assert not waits_for_lost_hosts(notes, killed("Killed"))
