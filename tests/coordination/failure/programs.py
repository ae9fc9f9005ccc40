"""Programs to which a failure is delivered while they do what their names say; a thread plays the watcher.

Arguments: a folder for what they say, and the names. Each is a fork, and writes its exit code at last.
"""

import asyncio
import atexit
import code
import concurrent.futures
import contextlib
import csv
import ctypes
import functools
import gc
import gzip
import io
import logging
import multiprocessing
import os
import pdb
import queue
import sys
import tempfile
import threading
import time
import unittest
import weakref
import zipfile
from pathlib import Path

import h5py

from distman import JobFailed, surviving_failure
from distman._base import timing
from distman._coordination.failure import hook
from distman._coordination.failure.interruption import Interruption, Patience
from distman._coordination.failure.record import FailureRecord

AT_ONCE = 6
LONG = 60.0  # seconds, more than the program is given
RECORD = FailureRecord(1, "n1", 101, "ValueError", "boom", "Traceback ...\nValueError: boom")

is_at_work = threading.Event()
is_over = threading.Event()


def work(seconds=0.02):
    """Do something in Python, for most of the time of this program."""
    is_at_work.set()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)


def again_and_again(step):
    """Make a program of what a function does once."""

    @functools.wraps(step)
    def program():
        while True:
            step()

    program.is_program = True
    return program


def plain():
    work(LONG)


def through_finally():
    try:
        work(LONG)
    finally:
        sys.stdout.write("cleaned up\n")


@again_and_again
def through_except_exception():
    try:
        work()
    except Exception:  # noqa: BLE001
        sys.stdout.write("swallowed\n")


@again_and_again
def through_suppress():
    with contextlib.suppress(Exception):
        work()


@again_and_again
def through_generators():
    def numbers():
        try:
            yield from range(5)
        except Exception:  # noqa: BLE001
            yield 5

    for _ in numbers():
        work(0.002)


@again_and_again
def through_the_ends_of_blocks():
    @contextlib.contextmanager
    def block():
        try:
            yield
        finally:
            work(0.002)

    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(block())
        stack.callback(work, 0.002)


def through_threads():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in pool.map(work, [0.01] * 400):
            pass


def through_tasks_of_asyncio():
    async def step():
        await asyncio.sleep(0.001)
        work(0.002)

    async def main():
        while True:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(step())
            await asyncio.gather(step(), step(), return_exceptions=True)

    asyncio.run(main())


def through_callbacks_of_asyncio():
    async def main():
        for _ in range(20):
            asyncio.get_running_loop().call_soon(work)
        await asyncio.sleep(LONG)

    asyncio.run(main())


def through_a_handler_that_awaits():
    async def main():
        try:
            while True:
                work(0.002)
        except JobFailed:
            await asyncio.sleep(0.3)
            sys.stdout.write("saved\n")
            raise

    asyncio.run(main())


def through_a_slow_handler():
    try:
        work(LONG)
    except JobFailed:
        work(0.3)
        sys.stdout.write("saved\n")
        raise


def through_exit_0_in_a_handler():
    try:
        work(LONG)
    except JobFailed:
        work()
        sys.exit(0)


def through_a_group():
    try:
        raise ExceptionGroup("several", [ValueError()])
    except* ValueError:
        work(LONG)


def while_it_is_stored():
    stored = []
    try:
        work(LONG)
    except JobFailed as error:
        stored.append(error)
    work(0.3)
    sys.stdout.write("saved\n")
    raise stored.pop()


def report(lock):
    sys.stdout.write("the lock is free\n" if lock.acquire(timeout=1.0) else "the lock is held\n")


def holding_a_condition():
    condition = threading.Condition(threading.Lock())
    is_at_work.set()
    try:
        while True:
            with condition:
                pass
    finally:
        report(condition)


def holding_a_queue():
    items = queue.Queue()
    is_at_work.set()
    try:
        while True:
            items.put(1)
            items.get()
    finally:
        report(items.mutex)


def holding_a_log():
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("tight")
    logger.addHandler(handler)
    is_at_work.set()
    try:
        while True:
            logger.warning("step")
            handler.stream.truncate(0)
    finally:
        report(handler.lock)


def swallowed_once():
    with contextlib.suppress(BaseException):
        work(LONG)
    work(LONG)


def swallowed_by_finally_and_return():
    def step():
        try:
            work(LONG)
        finally:
            return  # noqa: B012

    step()
    work(LONG)


def swallowed_by_a_group():
    try:
        work(LONG)
    except* JobFailed:
        pass
    work(LONG)


def swallowed_by_unittest():
    class Case(unittest.TestCase):
        def test_it(self):
            work(LONG)

    unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
    work(LONG)


def swallowed_by_a_console():
    code.InteractiveInterpreter({"work": work}).runsource("try: work(60)\nexcept BaseException: pass\n", symbol="exec")
    work(LONG)


def swallowed_by_a_debugger():
    with contextlib.suppress(BaseException):
        pdb.Pdb(stdin=io.StringIO("c\n"), stdout=io.StringIO()).runcall(work, LONG)
    work(LONG)


def swallowed_at_the_end():
    with contextlib.suppress(BaseException):
        work(LONG)


def swallowed_and_left():
    with contextlib.suppress(BaseException):
        work(LONG)
    is_over.set()
    interruption.restore()


def for_ever_by_a_loop_of_waits_that_raise_it():
    while True:
        try:
            work(0.001)
            if interruption._delivery is not None:
                error = RECORD.to_failure()
                interruption.note(error)
                raise error
        except:  # noqa: E722
            error = None


@again_and_again
def for_ever_by_a_bare_except():
    try:
        work()
    except:  # noqa: E722
        sys.stderr.write("skipped\n")


@again_and_again
def for_ever_in_a_destructor():
    class Slow:
        def __del__(self):
            work()

    Slow()


@again_and_again
def for_ever_in_a_callback_of_c():
    ctypes.CFUNCTYPE(None)(lambda: work(LONG))()  # seldom between two: what is raised there ends the program


@again_and_again
def for_ever_in_a_weak_reference():
    thing = threading.Event()
    _reference = weakref.ref(thing, lambda _: work())
    del thing


def for_ever_in_the_garbage_collector():
    gc.callbacks.append(lambda _phase, _info: work())
    while True:
        gc.collect(0)


def for_ever_in_a_handler():
    try:
        work(LONG)
    except JobFailed:
        work(LONG)


def for_ever_in_native_code():
    try:
        work(LONG)
    except JobFailed:
        work(0.0)
        take = ctypes.CDLL(None).pthread_mutex_lock
        lock = ctypes.create_string_buffer(64)
        take(lock)
        take(lock)  # never returns


def survived():
    with surviving_failure() as failure:
        work(LONG)
    work(0.3)
    assert failure.error.rank == 1


def survived_by_the_inner_of_two_blocks():
    with surviving_failure() as outer:
        with surviving_failure() as inner:
            work(LONG)
        work(0.3)
    assert inner
    assert not outer


def survived_in_a_group():
    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(0.001))
            work(LONG)

    with surviving_failure() as failure:
        try:
            asyncio.run(main())
        except JobFailed as error:
            raise BaseExceptionGroup("several", [error]) from None
    work(0.3)
    assert failure


def survived_by_acknowledgement():
    try:
        work(LONG)
    except JobFailed as error:
        error.acknowledge()
    work(0.3)


def open_files():
    """Write into files of all kinds, and close none."""
    files = [Path("text.txt").open("w"), csv_file := Path("rows.csv").open("w", newline="")]  # noqa: SIM115
    files[0].write("a line\n")
    csv.writer(csv_file).writerow([1, 2])
    files.append(gzip.open("text.gz", "wt"))  # noqa: SIM115
    files[-1].write("a line\n")
    files.append(zipfile.ZipFile("files.zip", "w"))
    files[-1].writestr("a", "b")
    files.append(h5py.File("numbers.h5", "w"))
    files[-1]["x"] = 1
    files += [tempfile.TemporaryDirectory(dir="."), tempfile.NamedTemporaryFile(dir=".")]  # noqa: SIM115
    return files


def plain_with_open_files():
    files = open_files()
    work(LONG)
    return files


def fails_with_open_files():
    files = open_files()
    raise KeyError(len(files))


def fails_by_exit_3():
    sys.exit(3)


def fails_by_exit_1_in_a_handler():
    try:
        raise KeyError("why")
    except KeyError:
        sys.exit(1)


def ends_by_exit_0():
    sys.exit(0)


def ends_by_an_exit_code_that_is_expected():
    hook.expect_exits(75)
    sys.exit(75)


def ends_though_an_exit_was_caught():
    with contextlib.suppress(SystemExit):
        sys.exit(3)


def stuck_in_a_thread():
    threading.Thread(target=time.sleep, args=[LONG]).start()
    raise KeyError("why")


def stuck_in_a_pool():
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, LONG)
    raise KeyError("why")


def stuck_in_an_exit_handler():
    atexit.register(time.sleep, LONG)
    raise KeyError("why")


def stuck_as_a_survivor():
    threading.Thread(target=time.sleep, args=[LONG]).start()
    work(LONG)


def fails_with_a_child():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[LONG])
    child.start()
    sys.stdout.write(f"child {child.pid}\n")
    raise KeyError("why")


def say_how_often():
    delivery = interruption._delivery
    sys.stdout.write(f"swallowed {delivery.num_swallowed if delivery else 0} times\n")


def report_error(error):
    if not RECORD.is_told_by(error):
        record = FailureRecord.of(error, 0)
        sys.stdout.write(f"told {record.error_type}: {record.error_text}\n")


def deliver():
    is_at_work.wait()
    interruption.deliver(RECORD)


def run(name):
    global interruption
    hook.install(report_error)
    timing.END_OF_PROCESS = 1.0 if name.startswith(("stuck", "fails_with_a_child")) else 60.0
    to_come = 1.0 if name.startswith("for_ever") else 60.0  # a busy machine may keep the main thread from an answer
    patience = Patience(to_handle=2.0, to_come=to_come, to_give_in=1.5, between_looks=0.02)

    def tell(error):
        sys.stdout.write(f"told the launcher of {error.error_type}\n")

    interruption = Interruption(lambda record: hook.announce(record, 0), tell, is_over, patience)
    atexit.register(
        lambda: sys.stdout.write(f"swallowed {getattr(interruption._delivery, 'num_swallowed', 0)} times\n")
    )
    threading.Thread(target=deliver, daemon=True).start()
    globals()[name]()
    sys.stdout.write("the end\n")


def main(folder, *names):
    gc.freeze()  # else the end of each fork would copy what they share
    waiting, children = list(names), {}
    while waiting or children:
        if waiting and len(children) < AT_ONCE:
            name = waiting.pop()
            child = os.fork()
            if child == 0:
                for number, stream in ((1, "stdout"), (2, "stderr")):
                    os.dup2(os.open(Path(folder, f"{name}.{stream}"), os.O_CREAT | os.O_WRONLY), number)
                Path(folder, name).mkdir()
                os.chdir(Path(folder, name))
                run(name)
                return
            children[child] = name
        else:
            child, status = os.wait()
            Path(folder, f"{children.pop(child)}.code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(*sys.argv[1:])
