import re

import pytest

from distman.testing._serialization import UnpicklableError, pack

FAILING = """
import ctypes, os, sys, threading, time, unittest, warnings
import pytest
import torch
import torch.distributed as dist
from distman.testing import kill_rank, ranks

class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.handle = threading.Lock()

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

@ranks(2)
def test_assertion(rank):
    print("out of", rank)
    sys.stderr.write(f"err of {rank}")
    numbers = [1, 2, 3]
    assert numbers == [1, 2, 3 + rank]

@ranks(2)
def test_same_error():
    raise ValueError("everywhere")

@ranks(3)
def test_others_in_collective(rank):
    if rank == 1:
        raise ValueError("the first cause")
    dist.all_reduce(torch.ones(3))

@ranks(3)
def test_others_asleep(rank):
    if rank == 2:
        raise ValueError("the first cause")
    time.sleep(60)

@ranks(3, timeout=1)
def test_stuck(rank):
    if rank == 2:
        threading.Thread(target=time.sleep, args=(50,)).start()
        ctypes.CDLL(None).sleep(60)
    dist.barrier()

@ranks(2)
def test_killed(rank):
    os.write(1, b"by the file descriptor")
    sys.stderr.write("some last words")
    kill_rank(1)

@ranks(2)
def test_segfault(rank):
    if rank == 0:
        ctypes.string_at(0)

@ranks(2)
def test_exit_code(rank):
    os._exit(3 * rank + 4)

@ranks(2)
def test_system_exit(rank):
    if rank == 0:
        sys.exit(5)

@ranks(2)
def test_keyboard_interrupt(rank):
    if rank == 1:
        raise KeyboardInterrupt

@ranks(2)
def test_odd_error(rank):
    if rank == 0:
        raise OddError("this", "that")

@ranks(2)
def test_unspeakable(rank):
    if rank == 0:
        raise Unspeakable

@ranks(2)
def test_chain(rank):
    try:
        {}["missing key"]
    except KeyError as error:
        raise ValueError("the consequence") from error

@ranks(2)
def test_pytest_fail():
    pytest.fail("given up")

@ranks(2)
def test_warning_is_error():
    warnings.warn("mind this")

@ranks(2)
def test_skipped_on_some(rank):
    if rank == 1:
        pytest.skip("not for me")

@ranks(3, dies=[1])
def test_lives(rank):
    pass

@ranks(3, dies=[1])
def test_wrong_one_dies(rank):
    kill_rank(1)
    kill_rank(2)

@ranks(2)
def test_lock(lock):
    pass

@ranks(2)
def test_capsys(capsys):
    pass

@pytest.fixture
def lock():
    return threading.Lock()

@ranks(2)
def test_raises_after_the_test(rank):
    if rank == 1:
        dist.destroy_process_group = fail

def fail(*args):
    raise ValueError("while leaving")

class TestOfUnittest(unittest.TestCase):
    @ranks(2)
    def test_method(self):
        pass

@ranks(4)
def test_afterwards_all_is_well(rank):
    tensor = torch.tensor(rank)
    dist.all_reduce(tensor)
    assert tensor == 6

class SlowToTell(Exception):
    def __str__(self):
        time.sleep(self.args[0])
        return "told at last"

@ranks(2)
def test_slow_to_describe(rank):
    if rank == 0:
        raise ValueError("at once")
    raise SlowToTell(1)  # several times while it is described

@ranks(3, timeout=1)
def test_never_described(rank):
    if rank == 0:
        raise ValueError("at once")
    if rank == 1:
        raise SlowToTell(60)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def failing(project):
    project.write(FAILING)
    return project.run("-v", is_fresh=True)


def test_only_the_last_one_passes(failing):
    assert failing.exit_code == 1
    assert failing.counts() == {"failed": FAILING.count("@ranks") - 1, "passed": 1}


def test_assertions_are_explained(failing):
    report = failing.report("test_assertion[2 ranks]")
    assert report.startswith("\nrank 1 raised AssertionError: assert [1, 2, 3] == [1, 2, 4]")
    assert "  rank 0: passed\n" in report
    assert ">       assert numbers == [1, 2, 3 + rank]" in report
    assert "At index 2 diff: 3 != 4" in report
    assert "test_it.py:22: AssertionError" in report
    assert "worker.py" not in report
    assert "tracebacks.py" not in report


def test_output_is_shown_by_rank(failing):
    report = failing.report("test_assertion[2 ranks]")
    for rank in (0, 1):
        assert f"Captured rank {rank} stdout call" in report
        assert f"out of {rank}\n" in report
        assert f"Captured rank {rank} stderr call" in report
        assert f"err of {rank}\n" in report


def test_one_text_for_the_same_error(failing):
    report = failing.report("test_same_error[2 ranks]")
    assert "ranks 0, 1 raised ValueError: everywhere" in report
    assert report.count('raise ValueError("everywhere")') == 1


def test_others_in_a_collective_fail_at_once_and_briefly(failing):
    report = failing.report("test_others_in_collective[3 ranks]")
    assert report.startswith("\nrank 1 raised ValueError: the first cause")
    for rank in (0, 2):
        assert f"  rank {rank}: failed only because another rank did (" in report
    assert "work.wait()" not in report


def test_others_elsewhere_are_stopped_and_shown(failing):
    report = failing.report("test_others_asleep[3 ranks]")
    assert report.startswith("\nrank 2 raised ValueError: the first cause")
    assert re.search(r"  rank 0: stopped \d+\.\d s after rank 2 failed", report)
    assert "---- ranks 0, 1 ----" in report
    assert "time.sleep(60)" in report


def test_an_error_that_takes_long_to_describe_is_described(failing):
    report = failing.report("test_slow_to_describe[2 ranks]")
    assert "  rank 0: raised ValueError: at once" in report
    assert "SlowToTell: told at last" in report.split("rank 1: raised ")[1].splitlines()[0]


def test_an_error_that_takes_for_ever_to_describe_is_given_up(failing):
    report = failing.report("test_never_described[3 ranks]")
    assert report.startswith("\nrank 0 raised ValueError: at once")
    for rank in (1, 2):
        assert re.search(rf"  rank {rank}: stopped 1\d\.\d s after rank 0 failed", report)
    assert "time.sleep(self.args[0])" in report


def test_stuck_ranks_show_all_their_threads(failing):
    report = failing.report("test_stuck[3 ranks]")
    assert report.startswith("\nranks 0, 1, 2 had not ended after 1 s (stuck)")
    first, second = report.index("dist.barrier()"), report.index("ctypes.CDLL(None).sleep(60)")
    assert first < report.index("work.wait()") < second
    assert "Thread 0x" in report[second:]
    assert "self._target(*self._args, **self._kwargs)" in report[second:]


def test_dead_ranks_show_signal_and_last_words(failing):
    report = failing.report("test_killed[2 ranks]")
    assert report.startswith("\nrank 1 died of SIGKILL")
    assert "  rank 0: passed\n" in report
    assert "It last wrote to standard error:\nsome last words" in report
    assert report.count("by the file descriptor") == 2


def test_a_crash_shows_where_it_was(failing):
    report = failing.report("test_segfault[2 ranks]")
    assert report.startswith("\nrank 0 died of SIGSEGV")
    assert "in test_segfault" in report


def test_exit_codes_are_shown(failing):
    report = failing.report("test_exit_code[2 ranks]")
    assert "  rank 0: died with exit code 4\n  rank 1: died with exit code 7\n" in report


@pytest.mark.parametrize(
    ("test", "headline"),
    [
        ("test_system_exit", "rank 0 raised SystemExit: 5"),
        ("test_keyboard_interrupt", "rank 1 raised KeyboardInterrupt"),
        ("test_odd_error", "OddError: this and that"),
        ("test_unspeakable", "Unspeakable: <exception str() failed>"),
        ("test_pytest_fail", "ranks 0, 1 raised Failed: given up"),
        ("test_warning_is_error", "ranks 0, 1 raised UserWarning: mind this"),
        ("test_raises_after_the_test", "rank 1 raised ValueError: while leaving"),
    ],
)
def test_every_exception_arrives(failing, test, headline):
    assert headline in failing.report(f"{test}[2 ranks]").splitlines()[1]


def test_causes_are_shown(failing):
    report = failing.report("test_chain[2 ranks]")
    assert "KeyError: 'missing key'" in report
    assert "The above exception was the direct cause" in report


def test_a_skip_on_some_ranks_is_an_error(failing):
    report = failing.report("test_skipped_on_some[2 ranks]")
    assert "rank 1 skipped the test, and not all did: not for me" in report


def test_an_expected_death_must_happen(failing):
    assert "rank 1 passed, but was expected to die" in failing.report("test_lives[3 ranks]")


def test_only_expected_deaths_are_accepted(failing):
    report = failing.report("test_wrong_one_dies[3 ranks]")
    assert report.startswith("\nrank 2 died of SIGKILL\n")
    assert "  rank 1: died of SIGKILL, as expected" in report


OF_PYTEST = """
    cache capfd capfdbinary caplog capsys capsysbinary pytestconfig record_property record_testsuite_property
    record_xml_attribute recwarn request tmp_path_factory tmpdir_factory
"""


@pytest.mark.filterwarnings("ignore:record_xml_attribute is an experimental feature")
@pytest.mark.parametrize("name", OF_PYTEST.split())
def test_fixtures_of_the_pytest_process_stay_there_under_any_name(request, name):
    value = request.getfixturevalue(name)
    with pytest.raises(UnpicklableError, match=r"The fixture 'mine' must stay in the pytest process"):
        pack(print, {"mine": value}, (), ())


def test_what_cannot_travel_is_named(failing):
    assert "The argument 'lock' must be picklable" in failing.report("test_lock[2 ranks]")
    assert "The fixture 'capsys' must stay in the pytest process" in failing.report("test_capsys[2 ranks]")


def test_methods_of_unittest_are_refused(failing):
    assert "not of unittest.TestCase" in failing.report("TestOfUnittest.test_method")
