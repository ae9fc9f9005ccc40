"""Random tasks that do to their worker what tasks do, and whether each future gets its own task's answer.

``python -m tests.executor.misbehaviour --tasks 1000 --seed 3`` runs many; a few run with the tests. A future must have
what its own task returned or raised, or an error of the executor's that fits what its task did.
"""

# ruff: noqa: ARG001, ARG005 - a task need not look at its device, nor a check at all it gets
import argparse
import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import torch

from distman.errors import WorkerDiedError, WorkerError
from distman.executor import ParallelExecutor

KINDS = {}  # what a task does: the function, and what its future must have
SPILLING = {}  # what may end or change the worker under another task
HANGING = {}  # what never answers


def kind(expected, into=KINDS):
    """Let a function be a kind of task: it gets its device and a number of its own."""

    def enter(function):
        into[function.__name__] = function, expected
        return function

    return enter


def answers(make=lambda number: number):
    return lambda number, value, error: error is None and is_equal(value, make(number))


def raises(expected):
    def is_right(number, value, error):
        located = isinstance(error.__cause__, WorkerError) and "raised" in str(error.__cause__)
        return type(error) is expected and str(number) in str(error) and located

    return is_right


def is_told(text, expected=WorkerError):
    return lambda number, value, error: (
        type(error) is expected and re.search(text.format(number), str(error)) is not None
    )


def dies(text):
    return is_told(text, WorkerDiedError)


def is_equal(value, expected):
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor) and torch.equal(value, expected)
    if isinstance(expected, np.ndarray):
        return isinstance(value, np.ndarray) and np.array_equal(value, expected)
    if isinstance(expected, list):
        return len(value) == len(expected) and all(map(is_equal, value, expected))
    return type(value) is type(expected) and value == expected


class TwoArgumentsError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{text} {code}")


class HoldsALockError(Exception):
    def __init__(self, number):
        super().__init__(number)
        self.lock = threading.Lock()


class OwnError(Exception):
    pass


class ForksWhenItIsPickled:
    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return int, (self.number if os.fork() else -1,)


class ForksWhenItIsShownError(TwoArgumentsError):  # which is not loaded, and so not shown in the program
    def __str__(self):
        return f"{super().__str__()} {'parent' if os.fork() else 'copy'}"


class ForksWhenItIsLoaded:
    def __reduce__(self):
        return os.fork, ()


class DoesNotLoad:
    def __reduce__(self):
        return int, ("no number",)


@kind(answers())
def returns_a_number(device, number):
    return number


@kind(answers(lambda number: torch.full((100_000,), number)))
def returns_a_large_tensor(device, number):
    return torch.full((100_000,), number, device=device)


@kind(answers(lambda number: [torch.full((50_000,), number), torch.full((10,), number)]))
def returns_views(device, number):
    base = torch.full((50_000,), number, device=device)
    return [base, base[5:15]]


@kind(answers(lambda number: np.full(70_000, number)))
def returns_an_array(device, number):
    return np.full(70_000, number)


@kind(answers(lambda number: f"{number} " * 500_000))
def returns_a_long_text(device, number):
    return f"{number} " * 500_000


@kind(answers(lambda number: [torch.tensor(number)] * 300))
def returns_many_tensors(device, number):
    return [torch.tensor(number, device=device) for _ in range(300)]


@kind(lambda number, value, error: error is None and value() == number)
def returns_a_function(device, number):
    return lambda: number


@kind(lambda number, value, error: error is None and type(value) is OwnError and value.args == (number,))
def returns_an_exception(device, number):
    return OwnError(number)


@kind(raises(ValueError))
def raises_an_error(device, number):
    raise ValueError(number)


@kind(raises(OwnError))
def raises_an_error_of_its_own(device, number):
    try:
        raise KeyError(-1)
    except KeyError as error:
        raise OwnError(number) from error


@kind(raises(StopIteration))
def raises_stop_iteration(device, number):
    raise StopIteration(number)


@kind(raises(RecursionError))
def recurses(device, number):
    try:
        recurses(device, number)
    except RecursionError:
        raise RecursionError(number) from None


@kind(is_told("raised .*TwoArgumentsError: text {}\n"))
def raises_what_cannot_be_loaded(device, number):
    raise TwoArgumentsError(number, "text")


@kind(is_told("raised .*HoldsALockError: {}\n"))
def raises_what_cannot_be_pickled(device, number):
    raise HoldsALockError(number)


@kind(is_told("raised KeyboardInterrupt: {}\n"))
def is_interrupted(device, number):
    raise KeyboardInterrupt(number)


@kind(is_told("raised GeneratorExit: {}\n"))
def raises_generator_exit(device, number):
    raise GeneratorExit(number)


@kind(is_told("raised .*ForksWhenItIsShownError: text {} parent"))
def raises_what_forks_when_it_is_shown(device, number):
    raise ForksWhenItIsShownError(number, "text")


@kind(is_told("cannot be pickled: .*generator"))
def generates(device, number):
    yield number


@kind(is_told("cannot be pickled: .*lock"))
def returns_a_lock(device, number):
    return number, threading.Lock()


@kind(is_told("cannot be pickled: .*socket"))
def returns_a_socket(device, number):
    return socket.socket()


@kind(is_told("cannot be pickled: .*(recursion|Recursion)"))
def returns_what_is_too_deep(device, number):
    result = number
    for _ in range(100_000):
        result = [result]
    return result


@kind(is_told("cannot be loaded here: ValueError: invalid literal"))
def returns_what_cannot_be_loaded(device, number):
    return DoesNotLoad()


@kind(dies(r"exit code 7: it called sys.exit: SystemExit: 7"))
def exits(device, number):
    sys.exit(7)


@kind(dies("exit code 1: it called sys.exit: SystemExit: enough of {}"))
def exits_with_a_text(device, number):
    sys.exit(f"enough of {number}")


@kind(dies("exit code 4"))
def exits_at_once(device, number):
    os._exit(4)


@kind(dies("SIGABRT"))
def aborts(device, number):
    os.abort()


@kind(dies("SIGKILL"))
def kills_itself(device, number):
    os.kill(os.getpid(), signal.SIGKILL)


@kind(dies("SIGTERM"))
def terminates_itself(device, number):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@kind(dies("SIGSEGV"))
def reads_where_nothing_is(device, number):
    ctypes.string_at(0)


@kind(dies("SIGKILL"))
def kills_its_group(device, number):
    subprocess.Popen(["sleep", "100"])
    os.killpg(0, signal.SIGKILL)


@kind(answers())
def forks_and_returns_twice(device, number):
    return number if os.fork() else -1


@kind(answers())
def forks_and_raises_in_the_copy(device, number):
    if os.fork() == 0:
        raise ValueError(-1)
    return number


@kind(raises(ValueError))
def forks_and_returns_in_the_copy(device, number):
    if os.fork() == 0:
        return -1
    raise ValueError(number)


@kind(dies("exit code 5"))
def forks_and_leaves_its_copy(device, number):
    if os.fork() == 0:
        return -1
    os._exit(5)


@kind(answers())
def forks_a_copy_that_lives_on(device, number):
    if os.fork() == 0:
        time.sleep(30)
        return -1
    return number


@kind(answers())
def forks_without_python(device, number):
    return number if ctypes.CDLL(None).fork() else -1


@kind(answers())
def forks_in_a_thread(device, number):
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()
    return number


@kind(answers())
def forks_while_its_result_is_pickled(device, number):
    return ForksWhenItIsPickled(number)


@kind(answers())
def has_processes_of_its_own(device, number):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=queue.put, args=(number,))
    process.start()
    found = queue.get()
    process.join()
    return found


@kind(answers())
def leaves_a_process(device, number):
    subprocess.Popen(["sleep", "30"], start_new_session=number % 2 == 0)
    return number


@kind(answers())
def leaves_threads(device, number):
    for is_daemon in (True, False):
        threading.Thread(target=time.sleep, args=(30,), daemon=is_daemon).start()
    return number


@kind(answers())
def closes_its_output(device, number):
    for stream in (sys.stdout, sys.stderr) if number % 2 else ():
        with contextlib.suppress(AttributeError):  # another task has set it to None
            stream.close()
    for descriptor in (1, 2) if number % 3 else ():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return number


@kind(answers())
def has_no_output(device, number):
    sys.stdout = sys.stderr = None
    return number


@kind(dies("closed its connection|died with exit code 1"))
def closes_all_files(device, number):
    os.closerange(3, 300)
    return number


@kind(dies("closed its connection|died with exit code 1"))
def opens_something_else_in_their_place(device, number):
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3, 300):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            os.dup2(null, descriptor)
    return number


@kind(dies("closed its connection|exit code 0"))
def becomes_another_program(device, number):
    command = ["sleep", "30"] if number % 2 else ["true"]
    os.execvp(command[0], command)  # noqa: S606 - no shell


@kind(answers())
def changes_its_surroundings(device, number):
    os.chdir("/")
    os.environ["TEST_DISTMAN"] = str(number)
    os.umask(0)
    os.setpgid(0, 0)
    return number


@kind(answers())
def changes_signals(device, number):
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN if number % 2 else lambda *_: 1 / 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGHUP})
    return number


@kind(answers())
def leaves_an_alarm(device, number):
    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return number


@kind(answers())
def changes_torch(device, number):
    torch.set_num_threads(1 + number % 4)
    torch.set_default_dtype([torch.float32, torch.float64][number % 2])
    torch.set_default_device(["cpu", "meta"][number % 2])
    torch.set_grad_enabled(number % 3 == 0)
    torch.manual_seed(number)
    return number


@kind(answers())
def turns_warnings_into_errors(device, number):
    warnings.simplefilter("error")
    return number


@kind(answers())
def has_an_executor_of_its_own(device, number):
    with ParallelExecutor(devices=["cpu"], pass_device=False) as inner:
        return inner.submit(abs, number).result()


@kind(answers())
def has_a_loop_of_its_own(device, number):
    async def wait():
        await asyncio.sleep(0)
        return number

    return asyncio.run(wait())


@kind(lambda number, value, error: type(error) in (MemoryError, RuntimeError) and "raised" in str(error.__cause__))
def runs_out_of_memory(device, number):
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, hard))
    try:
        return torch.ones(2**30, device=device) if number % 2 else bytearray(2**32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


@kind(answers(), SPILLING)
def leaves_a_thread_that_ends_the_worker(device, number):
    threading.Timer(0.02, os._exit, [9]).start()
    return number


@kind(answers(), SPILLING)
def leaves_a_limit(device, number):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return number


@kind(dies("was killed with its server|SIGKILL|died"), SPILLING)
def kills_the_server(device, number):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(30)


@kind(dies("did not answer"), HANGING)
def sleeps(device, number):
    time.sleep(300)


@kind(dies("did not answer"), HANGING)
def stops(device, number):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.kill(os.getpid(), signal.SIGSTOP)


@kind(lambda number, value, error: type(error) is TypeError and "must be picklable" in str(error))
def takes_what_cannot_be_pickled(device, number, argument=threading.Lock):
    return -1


@kind(is_told("could not load its task: ValueError: invalid literal"))
def takes_what_cannot_be_loaded(device, number, argument=DoesNotLoad):
    return -1


@kind(answers())
def takes_what_forks_when_it_is_loaded(device, number, argument=ForksWhenItIsLoaded):
    return number if argument else -1


def run(num_tasks, seed, groups=(KINDS,), timeout=None):
    """Run that many tasks, of all kinds alike; return what went wrong, and how often each kind ran.

    Where there are others than the plain kinds, a task may also find that its worker died or is out of order.
    """
    draw = random.Random(f"{num_tasks} {seed}")  # noqa: S311 - no secrets
    known = {name: known for group in groups for name, known in group.items()}
    all_names = [name for group in groups for name in group]
    names = [name for _ in range(-(-num_tasks // len(all_names))) for name in draw.sample(all_names, len(all_names))]
    names = names[:num_tasks]
    wrong = []
    with ParallelExecutor(devices=["cpu", "cpu"], timeout=timeout) as executor:
        futures = []
        for number, name in enumerate(names, 1):
            function, _ = known[name]
            arguments = [make() for make in function.__defaults__ or ()]
            futures.append(executor.submit(function, number, *arguments))
        cancelled = {number for number, future in enumerate(futures, 1) if draw.random() < 0.03 and future.cancel()}
        for number, (name, future) in enumerate(zip(names, futures, strict=True), 1):
            value, error = None, None
            try:
                value = future.result(100)
            except BaseException as raised:  # noqa: BLE001 - it is looked at
                error = raised
            is_right = (
                known[name][1](number, value, error) if number not in cancelled else isinstance(error, CancelledError)
            )
            is_told_so = isinstance(error, WorkerError) or isinstance(getattr(error, "__cause__", None), WorkerError)
            if not is_right and not (len(groups) > 1 and is_told_so):
                wrong.append(f"task {number}, which {name}: {str(value)[:100]}, {error!r}")
    return wrong, Counter(names)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    wrong, counts = run(options.tasks, options.seed)
    for groups, timeout in (((KINDS, KINDS, SPILLING), None), ((KINDS, KINDS, HANGING), 5.0)):
        more, others = run(options.tasks // 10, options.seed, groups, timeout)
        wrong, counts = wrong + more, counts + others
    seconds = time.monotonic() - began
    print(  # noqa: T201 - a command
        f"{counts.total()} tasks of {len(counts)} kinds in {seconds:.0f} s: {len(wrong)} with a wrong answer",
        *wrong,
        sep="\n",
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
