import json
import signal

import pytest

from distman._cli.run.outcome import Outcome, RankOutcome
from distman._coordination.failure.record import FailureRecord


def record(rank, kind="ValueError", text="boom", trace="Traceback ...\nValueError: boom\n"):
    return FailureRecord(rank, "n1", 100 + rank, kind, text, trace)


def outcome(*ranks, interruption=None):
    """The outcome of ranks that ended in this order: (rank, exit code, what it told, was ended)."""
    made = []
    for rank, code, told, was_ended in ranks:
        own = told if told is not None and told.rank in (rank, -1) else None
        made.append(RankOutcome(rank, 100 + rank, code, was_ended, own, None if own else told))
    return Outcome(tuple(made), interruption)


def ended(rank, exit_code, **said):
    return RankOutcome(rank, 100 + rank, exit_code, was_ended=False, **said)


def test_nothing_is_said_of_ranks_that_ended_well():
    ended = outcome((0, 0, None, False), (1, 0, None, False))
    assert (ended.exit_code, ended.failure, ended.report()) == (0, None, "")


def test_the_rank_that_failed_comes_first_though_it_ended_last():
    ended = outcome((0, 1, record(1), False), (2, 1, record(1), False), (1, 3, record(1), False))
    assert ended.exit_code == 3
    assert ended.report().splitlines() == [
        "distman run: rank 1 failed (pid 101, exit code 3):",
        "  Traceback ...",
        "  ValueError: boom",
        "The others: ranks 0, 2: exit code 1.",
    ]


def test_a_death_is_told_as_its_starter_saw_it():
    died = FailureRecord(1, "n1", 101, "died", "died: its connection broke.")
    ended = outcome((1, -signal.SIGKILL, None, False), (0, 1, died, False))
    assert ended.exit_code == 128 + signal.SIGKILL
    assert ended.report().startswith("distman run: rank 1 failed (pid 101, died of SIGKILL): it was killed")


def test_a_rank_that_left_is_named_though_its_exit_code_is_0():
    left = FailureRecord(1, "n1", 101, "left", "left the job before it came to a barrier.")
    ended = outcome((1, 0, None, False), (0, 1, left, False))
    assert ended.exit_code == 1
    assert ended.report().splitlines()[0] == (
        "distman run: rank 1 failed (pid 101, exit code 0): it left the job before it came to a barrier."
    )


def test_a_rank_that_left_with_a_code_of_its_own_gives_it():
    left = FailureRecord(1, "n1", 101, "left", "left the job before it came to a barrier.")
    ended = outcome((1, 3, None, False), (0, 1, left, False))
    assert ended.exit_code == 3
    assert "exit code 3): it left the job before it came to a barrier." in ended.report()


def test_a_silent_rank_that_was_ended_gives_no_exit_code():
    silent = FailureRecord(1, "n1", 101, "silent", "has been silent for 9 s.")
    ended = outcome((0, 1, silent, False), (1, -signal.SIGKILL, None, True))
    assert ended.exit_code == 1
    assert "(pid 101, ended by SIGKILL): it has been silent for 9 s." in ended.report()


def test_the_first_to_end_is_named_where_nobody_said_anything():
    ended = outcome((2, 5, None, False), (0, 1, None, False), (1, -signal.SIGTERM, None, True))
    assert ended.exit_code == 5
    assert ended.report().splitlines() == [
        "distman run: rank 2 failed (pid 102, exit code 5): it wrote nothing to standard error.",
        "The others: rank 0: exit code 1; rank 1: ended by SIGTERM.",
    ]


def test_what_torch_wrote_is_the_failure_of_the_rank_that_wrote_it():
    ended = outcome((1, 1, record(-1), False), (0, -signal.SIGTERM, None, True))
    assert ended.report().startswith("distman run: rank 1 failed (pid 101, exit code 1):\n  Traceback")


def test_two_errors_of_their_own_are_both_told():
    ended = outcome((1, 1, record(1), False), (0, 1, record(0, "KeyError", "'x'"), False))
    assert ended.report().splitlines()[-1] == "rank 0 failed too (exit code 1): KeyError: 'x'"


def test_ctrl_c_is_no_failure_of_a_rank():
    ended = outcome((0, 1, record(0, "KeyboardInterrupt", ""), False), interruption=signal.SIGINT)
    assert (ended.exit_code, ended.report()) == (130, "distman run: ended by SIGINT.")


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", [1, 0])
def test_an_error_of_a_rank_is_told_though_the_job_was_ended(interruption, first):
    died = FailureRecord(2, "n1", 102, "died", "died: its connection broke.")
    ranks = (
        ended(2, -interruption),
        ended(0, 1, own=record(0, "KeyboardInterrupt", ""), first=record(0, "KeyboardInterrupt", "")),
        ended(1, 1, own=record(1), first=record(1) if first else died),
    )
    job = Outcome(ranks, interruption)
    assert (job.exit_code, job.failure.rank) == (128 + interruption, 1)
    assert job.report().splitlines()[:4] == [
        f"distman run: ended by {interruption.name}.",
        "distman run: rank 1 failed (pid 101, exit code 1):",
        "  Traceback ...",
        "  ValueError: boom",
    ]
    assert json.loads(job.to_json())["failure"]["error_type"] == "ValueError"
    assert Outcome(ranks[:2], interruption).report() == f"distman run: ended by {interruption.name}."


def test_ranks_that_have_saved_ask_to_be_started_again_whatever_signal_told_them():
    for interruption in (None, signal.SIGTERM):
        job = Outcome((ended(1, 75), ended(0, 75)), interruption)
        assert (job.exit_code, job.failure) == (75, None)
        assert job.report() == "distman run: the ranks have saved, and ask to be started again (exit code 75)."
    assert Outcome((ended(1, 75), ended(0, 1))).failure.rank == 1


def test_what_ranks_wrote_moves_no_cursor():
    ended = outcome((0, 1, record(0, trace="\x1b[2J\nValueError: \x07"), False))
    assert "\x1b" not in ended.report()
    assert "\x07" not in ended.report()


def test_the_first_failure_in_the_job_s_store_counts_and_not_the_order_of_ends():
    late, early = record(0, "KeyError", "'x'"), record(1)
    job = Outcome((ended(0, 1, own=late, first=early), ended(1, 3, own=early, first=early)))
    assert job.exit_code == 3
    assert job.report().splitlines() == [
        "distman run: rank 1 failed (pid 101, exit code 3):",
        "  Traceback ...",
        "  ValueError: boom",
        "rank 0 failed too (exit code 1): KeyError: 'x'",
    ]


def test_what_a_rank_says_of_itself_is_better_than_hearsay():
    hearsay = FailureRecord(1, "n1", 101, "died", "died: its connection broke.")
    job = Outcome((ended(0, 1, first=hearsay), ended(1, 1, own=record(1))))
    assert job.report().startswith("distman run: rank 1 failed (pid 101, exit code 1):\n  Traceback")


def test_the_log_of_a_rank_that_ended_with_the_others_names_the_one_that_failed():
    assert ended(0, 1, first=record(1)).last_words() == (
        "distman run: rank 0 ended since rank 1 (n1, pid 101) raised ValueError: boom\n"
    )
    assert ended(0, 1, own=record(0), first=record(1)).last_words() == record(0).traceback_text
    assert ended(0, 1).last_words() == ""


def test_one_rank_alone_does_not_ask_for_another_start():
    job = outcome((1, 75, record(1, "exited", "ended with exit code 75.", ""), False), (0, 76, record(1), False))
    assert (job.exit_code, job.wants_restart) == (1, False)
