"""Programs to which a failure is delivered while they do what their names say; a thread plays the watcher.

Arguments: a folder for what they say, and the names. Each is a fork, and writes its exit code at last.
"""

import asyncio
import code
import contextlib
import ctypes
import gc
import logging
import os
import sys
import threading
import time
import weakref
from pathlib import Path

from distman import DistmanError, RankFailedError
from distman._coordination.failure import hook
from distman._coordination.failure.interruption import Interruption, Patience
from distman._coordination.failure.record import FailureRecord

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


def in_logging():
    class Slow(logging.Handler):
        def emit(self, record):
            try:
                work()
            except Exception:  # noqa: BLE001
                self.handleError(record)

    logger = logging.getLogger("slow")
    logger.addHandler(Slow())
    while True:
        logger.warning("step")


def in_a_destructor():
    class Slow:
        def __del__(self):
            work()

    while True:
        Slow()


def in_a_callback_of_asyncio():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_soon(work)
        await asyncio.sleep(LONG)

    asyncio.run(main())


def for_each_item():
    while True:
        try:
            work()
        except Exception as error:  # noqa: BLE001
            sys.stderr.write(f"skipped: {error}\n")


def by_a_bare_except():
    while True:
        try:
            work()
        except:  # noqa: E722, S112
            continue


def by_finally_and_return():
    def step():
        try:
            work()
        finally:
            return  # noqa: B012

    while True:
        step()


def in_a_callback_of_c():
    call = ctypes.CFUNCTYPE(None)(work)
    while True:
        call()


def in_a_weak_reference():
    while True:
        thing = threading.Event()
        _reference = weakref.ref(thing, lambda _: work())
        del thing


def in_the_garbage_collector():
    gc.callbacks.append(lambda _phase, _info: work())
    while True:
        gc.collect(0)


def by_suppress():
    while True:
        with contextlib.suppress(Exception):
            work()


def for_too_long():
    try:
        work(LONG)
    except Exception:  # noqa: BLE001
        work(LONG)


def in_finally_for_too_long():
    try:
        work(LONG)
    finally:
        work(LONG)


def in_native_code():
    try:
        work(LONG)
    except RuntimeError:
        take = ctypes.CDLL(None).pthread_mutex_lock
        lock = ctypes.create_string_buffer(64)
        take(lock)
        take(lock)  # never returns


def and_saved_before_sys_exit_0():
    try:
        work(LONG)
    except Exception:  # noqa: BLE001
        sys.exit(0)


def once():
    with contextlib.suppress(Exception):
        work(LONG)


def after_which_the_job_is_left():
    with contextlib.suppress(Exception):
        work(LONG)
    is_over.set()
    work(0.5)


def leave_the_job():
    is_over.set()
    interruption.restore()


def in_a_function_that_leaves_the_job():
    def main():
        try:
            work(LONG)
        finally:
            leave_the_job()

    with contextlib.suppress(Exception):
        main()


def by_tasks_of_asyncio():
    async def steps():
        while True:
            work()
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(steps(), steps(), return_exceptions=True)
        await asyncio.sleep(LONG)

    asyncio.run(main())


IN_A_GROUP = """
async def main():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(step())

async def step():
    work(LONG)

try:
    asyncio.run(main())
except* RankFailedError:
    work(LONG)
"""


def in_a_group():
    exec(IN_A_GROUP, globals())  # noqa: S102 - Python 3.10 has no such syntax


def out_of_a_group():
    try:
        try:
            exec(IN_A_GROUP.partition("except*")[0] + "finally:\n pass", globals())  # noqa: S102 - the same
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    except RankFailedError:
        work(0.5)


def and_raised_again():
    with contextlib.suppress(Exception):
        try:
            work(LONG)
        except RankFailedError:
            work()
            raise
    work(LONG)


def named_and_slow():
    try:
        work(LONG)
    except RankFailedError:
        work(2.0)


def named_by_its_base_class():
    with contextlib.suppress(DistmanError):
        work(LONG)
    work(0.5)


def named_in_a_tuple():
    try:
        [work() for _ in range(10_000)]
    except (OSError, RankFailedError) as error:
        sys.stderr.write(str(error))
    work(0.5)


def named_and_left():
    try:
        work(LONG)
    except RankFailedError:
        sys.stdout.write("the end\n")
        sys.exit(0)


def named_after_the_job_is_left():
    def main():
        try:
            work(LONG)
        finally:
            leave_the_job()

    try:
        main()
    except RankFailedError:
        work(0.1)


def named_around_what_is_swallowed_in_a_finally():
    def main():
        try:
            work(LONG)
        finally:
            with contextlib.suppress(Exception):
                wait_in_vain()
            leave_the_job()

    with contextlib.suppress(RankFailedError):
        main()


def wait_in_vain():
    try:
        raise RECORD.to_error()
    except RankFailedError as error:
        interruption.note(error)
        raise


def shown_by_a_console():
    code.InteractiveInterpreter({"work": work}).runsource("work(60)")
    work(0.5)


def deliver():
    is_at_work.wait()
    interruption.deliver(RECORD)


def run(name):
    global interruption
    hook.install(lambda _: None)
    patience = Patience(to_come=1.0, to_handle=1.0, to_give_in=1.0, between_looks=0.02)

    def tell(error):
        sys.stdout.write(f"told the launcher of {error.error_type}\n")

    interruption = Interruption(tell, is_over, patience=patience)
    threading.Thread(target=deliver, daemon=True).start()
    globals()[name]()
    sys.stdout.write("the end\n")


def main(folder, *names):
    children = {}
    for name in names:
        child = os.fork()
        if child == 0:
            for number, stream in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(folder, f"{name}.{stream}"), os.O_CREAT | os.O_WRONLY), number)
            run(name)
            return
        children[child] = name
    while children:
        child, status = os.wait()
        Path(folder, f"{children.pop(child)}.code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(*sys.argv[1:])
