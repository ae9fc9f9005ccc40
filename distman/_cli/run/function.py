"""A function as a job of several ranks, from a program or a notebook."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from distman._base.interpreter import environment, options, program
from distman._base.process_tree import end_with_parent
from distman._cli.output import shown_ranks
from distman._cli.run.job import number_of_ranks
from distman._cli.run.outcome import OF_A_SHELL
from distman._workers.pickling import ModulePickler
from distman.errors import DistmanError, RankFailedError

T = TypeVar("T")

_CALL = "call"  # the file with a pickle of function, arguments and keyword arguments
_STARTER = """
from distman._cli import main
from distman._cli.run.function import end_with_caller
end_with_caller({pid})
sys.exit(main())
"""
_RANK = """
from pathlib import Path
from distman._cli.run.function import call
call(Path(sys.argv[1]))
"""


def run(function: Callable[..., T], *args: Any, n: int | str = "auto", **kwargs: Any) -> list[T]:
    """Call a function in several new processes on this machine, the ranks of a job.

    Local. Each rank is an interpreter of its own; the function calls ``DistributedManager.initialize()`` as a script
    does. What they write is shown as of ``distman run``, in a notebook below its cell. Ctrl-C ends them. When this
    program is ended, they get SIGTERM, and may save.

    Args:
        function: Called on every rank; it, its arguments and what it returns are pickled by cloudpickle, so that it may
            be a lambda or stand in a notebook.
        args: Arguments.
        n: Number of ranks; ``"gpu"``, as many as there are GPUs; ``"cpu"``, as many as there are CPUs; ``"auto"``, the
            first where there are GPUs, else the second.
        kwargs: Arguments by name.

    Returns:
        What the function returned on each rank, in their order.

    Raises:
        RankFailedError: A rank failed; the error has its traceback.
        DistmanError: The job was ended from outside, or the function ended a rank's program instead of returning.
        ValueError: ``n`` is something else, or ``"gpu"`` where torch sees no GPU.
        TypeError: It is not a function, or something cannot be pickled; other errors of a ``__reduce__`` as they are.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.

    Example:
        >>> import distman
        >>> def work(offset):
        ...     from distman import DistributedManager
        ...     DistributedManager.initialize()
        ...     return DistributedManager().rank + offset
        >>> distman.run(work, 10, n=2)
        [10, 11]
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}. To run a script, type `distman run` in a shell.")
    number = number_of_ranks(str(n))
    with tempfile.TemporaryDirectory(prefix="distman-run-") as name:
        folder = Path(name)
        with (folder / _CALL).open("wb") as file:
            ModulePickler(file).dump((function, args, kwargs))
        report = folder / "report.json"
        code = _start(["run", "-n", str(number), "--report", str(report), "--call", name])
        if not report.exists():
            raise DistmanError(f"the process that started the ranks {_end(code)}, and they with it.")
        said = json.loads(report.read_bytes())
        if said["failure"] is not None:
            raise RankFailedError(**said["failure"])
        if code:
            raise DistmanError(f"the job {_end(code)}.")
        files = [_result_file(folder, rank) for rank in range(number)]
        if lacking := [rank for rank, file in enumerate(files) if not file.exists()]:
            raise DistmanError(
                f"{shown_ranks(lacking)} ended with exit code 0 before the function returned: it must return, and not "
                "call sys.exit() or os._exit()."
            )
        return [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - from its own ranks, in a private folder


def _end(code: int) -> str:
    number = -code if code < 0 else code - OF_A_SHELL
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _start(arguments: list[str]) -> int:
    """Start the job, and show what it writes where this program writes, be that a notebook's cell."""
    is_own = _is_the_process_s(sys.stdout)
    with subprocess.Popen(
        [sys.executable, *options(), *program(_STARTER.format(pid=os.getpid())), *arguments],
        env=environment(),
        stdout=None if is_own else subprocess.PIPE,
        stderr=None if is_own else subprocess.STDOUT,
        encoding="utf-8",
        errors="backslashreplace",
    ) as job:
        try:
            for line in job.stdout or ():
                sys.stdout.write(line)
            return job.wait()
        except BaseException as error:  # also what a handler of SIGTERM raises
            job.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            job.communicate()
            raise


def end_with_caller(pid: int) -> None:
    """Let this process, the starter of a job, get SIGTERM when the one that has called for it ends."""
    if not end_with_parent(signal.SIGTERM, pid) and not Path(f"/proc/{pid}").exists():
        sys.exit(1)  # it had ended before


def _is_the_process_s(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 1)
    except (AttributeError, OSError, ValueError):  # a notebook's, or a test's
        return False


def program_of_rank(folder: Path) -> tuple[str, ...]:
    """Return what the interpreter of a rank is told to call what is in a folder."""
    return (*program(_RANK), str(folder))


def call(folder: Path) -> None:
    """Call the function from its pickle, and leave what it returns; the program of each rank."""
    function, args, kwargs = pickle.loads((folder / _CALL).read_bytes())  # noqa: S301 - the starter's, in its own folder
    result = function(*args, **kwargs)
    with _result_file(folder, int(os.environ["RANK"])).open("wb") as file:
        ModulePickler(file).dump(result)


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"
