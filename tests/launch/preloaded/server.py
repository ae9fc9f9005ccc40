"""Imports torch once, and forks for every client.

Arguments: number of the open file that listens, and room for the command line of a fork.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import itertools
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import weakref
from pathlib import Path

import ending  # before torch, so that its exit handler comes last
import imported
import numpy as np
import torch

# The first step of any optimizer imports torch._dynamo, which takes longer than torch itself.
MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.utils.data",
    "sklearn.datasets",
)
NAMESPACES = ("net", "uts", "mnt")  # mnt last: it may hide /proc of the others
LOWEST = 400  # the numbers of received files on their way to their places


class Server:
    """Forks; tells each client the process id, then how the process ended; kills it when the client is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, sys.exit)

    def run(self) -> dict:
        """Serve; return the request in a fork."""
        while True:
            for key, _ in self._selector.select():
                is_current = self._selector.get_map().get(key.fd) == key  # a fork and its client may end together
                if is_current and (request := key.data()):
                    return request

    def _accept(self) -> "dict | None":
        client, _ = self._listener.accept()
        try:
            request = receive(client)
        except (ConnectionError, ValueError):  # it was killed while it asked
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._forget()
            client.detach()
            return request
        for number in request["received"]:
            os.close(number)
        process = os.pidfd_open(pid)
        self._selector.register(process, selectors.EVENT_READ, lambda: self._ended(client, pid, process))
        self._selector.register(client, selectors.EVENT_READ, lambda: os.kill(pid, signal.SIGKILL))
        with contextlib.suppress(BrokenPipeError):
            client.sendall(f"{pid}\n".encode())
        return None

    def _forget(self) -> None:
        """Let no object close a file whose number is soon another's; the selector itself is shared with the parent."""
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()

    def _ended(self, client: socket.socket, pid: int, process: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(process)
        self._selector.unregister(client)
        os.close(process)
        with client, contextlib.suppress(BrokenPipeError):
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def main() -> None:
    """Serve, and go on in every fork as the program that the client asked for."""
    sys.modules["triton"] = None  # comes with a torch for GPUs, and complains if it is left to the kernel
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork copies what its collector touches
    ending.preloaded.update(sys.modules)
    imported.preload()  # after that: at its end a program that has imported it takes it apart, as all do
    for finalizer in weakref.finalize._registry:  # those of torch take its operators apart: half the cost of a fork
        finalizer.atexit = False
    request = Server(socket.socket(fileno=int(sys.argv[1]))).run()
    become(request)
    try:
        run(request["arguments"])
        ending.code = 0
    except SystemExit as error:
        ending.code = (error.code or 0) if isinstance(error.code, int | None) else 1
        raise


def hide_server(error: BaseException) -> None:
    """Leave out of a traceback what is before the program: START, `main` and `run`; raising it again adds nothing."""
    error.__traceback__ = error.__traceback__.tb_next.tb_next.tb_next or error.__traceback__


def receive(client: socket.socket) -> dict:
    length, received, _, _ = socket.recv_fds(client, 8, 200)
    message = b""
    while len(message) < int.from_bytes(length, "big"):
        message += (more := client.recv(1 << 16))
        if not more:
            raise ConnectionResetError
    pid, _, _ = np.frombuffer(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12), np.int32)
    return {**json.loads(message), "received": received, "client": int(pid)}


def become(request: dict) -> None:
    """Take the place of the client: its namespaces, files, limits, folder, environment and command line."""
    os.setsid()
    enter_namespaces(request["client"])
    take_files(request["files"], request["received"])
    os.sched_setaffinity(0, os.sched_getaffinity(request["client"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.prlimit(request["client"], resource.RLIMIT_NOFILE))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    show(["python", *request["arguments"]], request["environment"])
    torch.default_generator.seed()
    np.random.seed()
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()


def enter_namespaces(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    paths = [f"/proc/{pid}/ns/{name}" for name in NAMESPACES]
    others = [path for path in paths if Path(path).readlink() != Path(path.replace(str(pid), "self")).readlink()]
    for number in [os.open(path, os.O_RDONLY) for path in others]:
        if libc.setns(number, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def take_files(places: "list[int]", received: "list[int]") -> None:
    """Close all files but those received, and give these the numbers that they had in the client."""
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, LOWEST) for number in received]
    os.closerange(0, LOWEST)
    for number, place in zip(aside, places, strict=True):
        os.dup2(number, place)
        os.close(number)
    # A fork may be given an end of file, a terminal or a full disk: the interpreter opens them as at its start.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def show(arguments: "list[str]", environment: "dict[str, str]") -> None:
    """Write command line and environment to where ``/proc`` reads them, as `processes.marked` does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    argument_start, argument_end, environment_start, environment_end = (int(fields[i]) for i in (45, 46, 47, 48))
    write(argument_start, argument_end, arguments)
    write(environment_start, environment_end, [f"{name}={value}" for name, value in environment.items()])


def write(start: int, end: int, words: "list[str]") -> None:
    text = "".join(f"{word}\0" for word in words).encode(errors="surrogateescape")
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run(arguments: "list[str]") -> None:
    """Run what ``python ARGUMENTS`` runs, in `__main__`."""
    options = list(itertools.takewhile(lambda one: one[:1] == "-" and one not in ("-c", "-m"), arguments))
    if "-u" in options:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    first, *rest = arguments[len(options) :]
    sys.path[:1] = ["" if first in ("-c", "-m") else str(Path(first).resolve().parent)]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    main = sys.modules["__main__"]
    if first == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        if rest[:1] == ["distman"] and rest[1:2] in (["run"], ["keep"]):
            sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)  # of its ranks or checks, as of torchrun's
        sys.modules.pop(rest[0], None)  # else runpy warns that it runs a second time
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        if rest[1:2] == ["run"]:  # of distman.run
            sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102 - as an interpreter does
    else:
        sys.argv = [first, *rest]
        main.__file__ = str(Path(first).absolute())
        exec(compile(Path(first).read_bytes(), main.__file__, "exec"), vars(main))  # noqa: S102 - as an interpreter does
