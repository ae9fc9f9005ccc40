"""``distman run``, with real ranks."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from distman._cli import main
from distman._cli.parser import make_parser

from ...launch import preloaded
from ...launch.torchrun import Torchrun

LIMIT = 60


def distman_run(*arguments):
    return [sys.executable, "-m", "distman", "run", *map(str, arguments)]


def finish(*arguments, **kwargs):
    options = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False} | kwargs
    return subprocess.run(distman_run(*arguments), **options)


@pytest.fixture
def script(tmp_path):
    """Write a script, and return its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{textwrap.dedent(text)}")
        return path

    return write


def test_every_rank_runs_the_script_with_its_arguments(script):
    done = finish("-n", 3, script("print(sys.argv[1:], os.environ['WORLD_SIZE'])"), "--epochs", "3", "-n", "x", "--")
    assert (done.returncode, done.stderr) == (0, "")
    line = "['--epochs', '3', '-n', 'x', '--'] 3"
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {line}" for rank in range(3)]


def test_a_module_runs_as_well():
    done = finish("-n", 2, "-m", "platform")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2


def test_the_two_streams_stay_apart(script):
    done = finish("-n", 2, script("print('out'); print('err', file=sys.stderr)"))
    assert sorted(done.stdout.splitlines()) == ["0: out", "1: out"]
    assert sorted(done.stderr.splitlines()) == ["0: err", "1: err"]


def test_only_rank_0_reads_standard_input(script):
    done = finish("-n", 2, script("print(sys.stdin.read())"), input="hello")
    assert sorted(done.stdout.splitlines()) == ["0: hello", "1: "]


def test_the_end_of_a_script_without_this_package_is_told(script):
    done = finish("-n", 3, script("sys.exit(7) if rank == 2 else time.sleep(100)"))
    assert done.returncode == 7
    assert done.stderr.splitlines()[-2:] == [
        f"distman run: rank 2 failed (pid {pid_in(done.stderr)}, exit code 7): it wrote nothing to standard error.",
        "The others: ranks 0-1: ended by SIGTERM.",
    ]


def pid_in(text):
    return text.partition("pid ")[2].partition(",")[0]


@pytest.mark.usefixtures("preloaded_ranks")
def test_an_error_is_told_once_at_the_end_with_the_exit_code_of_the_guilty(script):
    path = script(
        """
        from distman import DistributedManager
        DistributedManager.initialize()
        manager = DistributedManager()
        print("up")
        manager.barrier()
        if rank == 1:
            raise ValueError("the learning rate must be positive")
        manager.barrier()
        """
    )
    done = finish("-n", 2, path)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["0: up", "1: up"]
    assert done.stderr.splitlines() == [
        f"distman run: rank 1 failed (pid {pid_in(done.stderr)}, exit code 1):",
        "  Traceback (most recent call last):",
        f'    File "{path}", line 10, in <module>',
        '      raise ValueError("the learning rate must be positive")',
        "  ValueError: the learning rate must be positive",
        "The others: rank 0: exit code 76.",
    ]


@pytest.mark.usefixtures("preloaded_ranks")
def test_a_death_is_told(script):
    path = script(
        """
        from distman import DistributedManager
        DistributedManager.initialize()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        DistributedManager().barrier()
        """
    )
    done = finish("-n", 2, path)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == [
        f"distman run: rank 1 failed (pid {pid_in(done.stderr)}, died of SIGKILL): it was killed; the kernel's log "
        "(dmesg) says whether memory ran out.",
        "The others: rank 0: exit code 76.",
    ]


def test_an_error_before_the_start_is_told(script):
    done = finish("-n", 2, script("import distman\nif rank == 0: raise KeyError('x')\ntime.sleep(100)"))
    assert done.returncode == 1
    assert "\n  KeyError: 'x'\nThe others: rank 1: ended by SIGTERM.\n" in done.stderr


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ("def (:", "SyntaxError: invalid syntax"),
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("sys.exit('no data in /scratch')", "no data in /scratch"),
        ("print('out of space', file=sys.stderr); os._exit(3)", "out of space"),
        ("os._exit(3)", None),
    ],
)
def test_what_a_rank_wrote_last_is_repeated_where_it_could_not_say_why(script, body, last):
    done = finish("-n", 2, script(body))
    report = done.stderr.rpartition("distman run: rank ")[2]
    if last is None:
        assert "exit code 3): it wrote nothing to standard error.\nThe others: " in report
    else:
        assert f"\n  {last}\nThe others: " in report
    assert done.returncode in (1, 3)


@pytest.mark.parametrize("option", ["-np", "--nproc-per-node", "--nproc_per_node", "--ranks"])
def test_the_number_of_ranks_has_the_names_that_other_launchers_have(option):
    assert make_parser().parse_args(["run", option, "2", "script.py"]).ranks == "2"


@pytest.fixture
def started():
    """Start ranks, which are gone at the end of the test."""
    processes = []

    def start(*arguments, hangup=signal.SIG_DFL, **kwargs):
        def prepare():  # these tests may run under nohup
            signal.signal(signal.SIGHUP, hangup)

        options = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": prepare} | kwargs
        processes.append(subprocess.Popen(distman_run(*arguments), **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_lines(process, number):
    return [process.stdout.readline() for _ in range(number)]


WAITS = "print('up'); time.sleep(1000)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all(number, script, started):
    process = started("-n", 2, script(WAITS), stderr=subprocess.PIPE)
    wait_for_lines(process, 2)
    ranks = psutil.Process(process.pid).children()
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert errors.endswith(f"distman run: ended by {number.name}.\n")
    assert not any(rank.is_running() for rank in ranks)


def test_a_second_signal_ends_what_does_not_heed_the_first(script, started):
    heed = "lambda *_: os.write(1, b'heard\\n')"  # to print may not be interrupted by printing
    process = started("-n", 2, script(f"signal.signal(signal.SIGTERM, {heed}); {WAITS}"))
    wait_for_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    heard = wait_for_lines(process, 2)  # two signals at the same time are one
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM  # the first would take 30 s
    assert sorted(heard) == ["0: heard\n", "1: heard\n"]


def test_a_rank_may_save_when_it_is_asked_to_end(script, started, tmp_path):
    text = f"""
    def save(*_):
        open({str(tmp_path)!r} + f"/saved-{{rank}}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    {WAITS}
    """
    process = started("-n", 2, script(text))
    wait_for_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=LIMIT)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_rank_that_saves_for_longer_than_its_grace_is_killed_with_a_sentence(script, started):
    text = f"""
    if rank == 1: signal.signal(signal.SIGTERM, lambda *_: None)
    while True: {WAITS}
    """
    process = started("-n", 2, "--grace", 1, script(text), stderr=subprocess.PIPE)
    wait_for_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-2:] == [
        "distman run: ended by SIGTERM.",
        "Still running 1 s after SIGTERM, and killed: rank 1. --grace SECONDS gives them longer.",
    ]


def test_a_save_that_fails_when_the_job_is_asked_to_end_is_told(script, started):
    text = f"""
    import distman
    def save(*_):
        if rank == 1: raise OSError(28, "No space left")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    {WAITS}
    """
    process = started("-n", 2, script(text), stderr=subprocess.PIPE)
    wait_for_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[0] == "distman run: ended by SIGTERM."
    assert "rank 1 failed (pid " in errors
    assert "\n  OSError: [Errno 28] No space left\n" in errors


@pytest.mark.usefixtures("preloaded_ranks")
def test_what_a_rank_raises_after_the_failure_of_another_is_told_too(script):
    path = script(
        """
        import distman
        manager = distman.DistributedManager.initialize()
        if rank == 3: raise ValueError("boom")
        if rank == 0:
            try: manager.barrier()
            except distman.JobFailed: open('/nowhere/state.pt')
        if rank == 1:
            try: manager.barrier()
            finally: open('/nowhere/state.pt')
        with distman.surviving_failure(): manager.barrier()
        open('/nowhere/state.pt')
        """
    )
    done = finish("-n", 4, path)
    assert "distman run: rank 3 failed" in done.stderr
    for rank in range(3):
        assert f"rank {rank} failed too (exit code 1): FileNotFoundError: [Errno 2] " in done.stderr
        # Torch may log that the connection to the rank that failed is gone.
        shown = re.findall(rf"^{rank}: (?!\[[EW]\d{{4}} ).*$", done.stderr, re.MULTILINE)
        assert any(line.endswith(", in <module>") for line in shown)
        assert shown[-1].endswith("FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/state.pt'")


def test_a_rank_that_has_saved_leaves_the_others_their_grace(script):
    """Longer than after a failure."""
    done = finish("-n", 2, script("time.sleep(8 * rank); sys.exit(75)"))
    assert done.returncode == 75


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_nothing_survives_the_starter(number, script, started):
    process = started("-n", 2, script(WAITS))
    wait_for_lines(process, 2)
    ranks = psutil.Process(process.pid).children()
    process.send_signal(number)
    process.wait(timeout=LIMIT)
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT)
    assert alive == []


def test_what_a_rank_leaves_behind_is_ended(script):
    text = """
    import subprocess
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL)
    print(child.pid)
    """
    done = finish("-n", 2, script(text))
    assert done.returncode == 0
    assert not any(psutil.pid_exists(int(line[3:])) for line in done.stdout.splitlines())


@pytest.mark.parametrize("stream", [1, 2])
def test_what_a_rank_leaves_behind_cannot_hold_it_up_by_writing(stream, script):
    text = f"""
    import subprocess
    child = subprocess.Popen(["yes"], stdout={stream})
    """
    assert finish("-n", 2, script(text)).returncode == 0


def test_each_rank_has_a_file(script, tmp_path):
    path = script("import distman\nprint('out', rank)\nprint('err', file=sys.stderr)\nassert rank == 0, 'wrong'")
    done = finish("-n", 2, "--log-dir", tmp_path / "logs" / "today", path)
    files = {file.name: file.read_text().splitlines() for file in (tmp_path / "logs" / "today").iterdir()}
    assert files["rank-0.log"] == ["out 0", "err"]
    assert files["rank-1.log"][:2] == ["out 1", "err"]
    assert files["rank-1.log"][-1] == "AssertionError: wrong"
    assert done.stdout.splitlines() == ["0: out 0"]


def test_all_ranks_are_shown_beside_their_files_on_request(script, tmp_path):
    done = finish("-n", 2, "--log-dir", tmp_path / "logs", "--tee", script("print(rank)"))
    assert sorted(done.stdout.splitlines()) == ["0: 0", "1: 1"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM])
def test_ranks_may_save_and_ask_to_be_started_again(number, script, started, monkeypatch):
    monkeypatch.setenv("DISTMAN_STOP_SIGNALS", "TERM,USR1,HUP,ALRM")
    text = f"""
    signal.signal({int(number)}, lambda *_: sys.exit(75))
    print("up")
    signal.pause()
    """
    process = started("-n", 2, script(text), stderr=subprocess.PIPE)
    wait_for_lines(process, 2)
    process.send_signal(number)
    assert process.communicate(timeout=LIMIT)[1].endswith("ask to be started again (exit code 75).\n")
    assert process.returncode == 75


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_may_save_when_their_terminal_is_closed(number, script, started, monkeypatch):
    monkeypatch.setenv("DISTMAN_STOP_SIGNALS", "TERM,HUP")
    text = """
    def save(*_):
        os.write(1, b"saving")
        print("...", file=sys.stderr)
        sys.exit(75)
    signal.signal(signal.SIGHUP, save)
    print(f"up {rank}")
    while True: signal.pause()
    """
    terminal, end = pty.openpty()
    process = started("-n", 2, script(text), stdin=subprocess.DEVNULL, stdout=end, stderr=end)
    os.close(end)
    shown = b""
    while not all(b"up %d" % rank in shown for rank in range(2)):  # a line may be drawn twice
        shown += os.read(terminal, 1000)
    os.close(terminal)
    for _ in range(number):  # the kernel says so, and the shell may
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=LIMIT) == 75


def test_a_hangup_is_ignored_under_nohup(script, started):
    path = script("print(signal.getsignal(signal.SIGHUP).name)\nif rank == 0: input()")
    process = started("-n", 2, path, stdin=subprocess.PIPE, hangup=signal.SIG_IGN)
    lines = wait_for_lines(process, 2)
    process.send_signal(signal.SIGHUP)
    process.communicate("\n", timeout=LIMIT)
    assert sorted(lines) == ["0: SIG_IGN\n", "1: SIG_IGN\n"]
    assert process.returncode == 0


def test_what_ranks_write_and_cannot_be_shown_is_no_failure_of_the_start(script, started):
    with Path("/dev/full").open("w") as full:
        process = started("-n", 2, script(WAITS), stdout=full, stderr=subprocess.PIPE)
    assert process.communicate(timeout=LIMIT)[1].splitlines()[0] == (
        "distman run: writing what the ranks print failed: [Errno 28] No space left on device. They have been ended."
    )
    assert process.returncode == 1


def test_the_report_is_for_programs(script, tmp_path):
    report = tmp_path / "report.json"
    done = finish("-n", 2, "--report", report, script("sys.exit(rank * 3)"))
    said = json.loads(report.read_text())
    assert (done.returncode, done.stderr) == (3, "")
    assert said["exit_code"] == 3
    assert said["failure"]["rank"] == 1
    assert sorted((one["rank"], one["exit_code"]) for one in said["ranks"]) == [(0, 0), (1, 3)]


def test_several_that_a_launcher_has_started_are_told_once(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = script("print('here')")
    for rank, sentence in enumerate(["env has started 2 of these, and each starts a job of its own", ""]):
        monkeypatch.setenv("RANK", str(rank))
        done = finish("-n", "1", path)
        assert done.returncode == 0
        assert sentence in done.stderr
        assert rank == 0 or not done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name the script to start, or -m and a module"),
        (["-n", "2"], "name the script to start, or -m and a module"),
        (["nowhere.py"], "there is no script 'nowhere.py' here"),
        (["-n", "0", __file__], "n must be a number of at least 1"),
        (["--nnodes", "2", __file__], "it starts ranks on this machine only. For several hosts, start the ranks with"),
        (["--nnodes=1:2", "-n", "2", __file__], "it starts ranks on this machine only"),
        (
            ["--report", "/nowhere/x.json", __file__],
            "--report must be a file, and no link, in a folder that exists, got /nowhere/x.json",
        ),
        (["--rank", "2", __file__], "unrecognized arguments: --rank"),
    ],
)
def test_wrong_use_is_told(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert complaint in said.err


def test_torchrun_blames_the_rank_that_failed(script):
    path = script(
        """
        from distman import DistributedManager
        DistributedManager.initialize()
        if rank == 1:
            raise ValueError("the learning rate must be positive")
        DistributedManager().barrier()
        """
    )
    done = Torchrun(preloaded.PYTHON).run(path, ranks=3, timeout=LIMIT)
    root_cause = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in root_cause
    assert "ValueError: the learning rate must be positive" in root_cause


def test_files_that_cannot_be_written_are_told_before_anything_runs(script, tmp_path):
    (tmp_path / "logs").write_text("no folder")
    done = finish("-n", 2, "--log-dir", tmp_path / "logs", script("print('ran')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("distman run: starting the ranks failed: ")


def test_a_reader_that_goes_away_ends_all(script, started):
    process = started("-n", 2, script("while True: print('x' * 1000)"), stderr=subprocess.PIPE)
    ranks = psutil.Process(process.pid).children()
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=LIMIT) == 128 + signal.SIGPIPE
    process.stdout = None
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT)
    assert alive == []
