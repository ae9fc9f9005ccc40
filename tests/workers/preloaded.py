"""Servers of workers that are forks of the preloaded interpreter, for tests in which parents do not matter."""

from types import SimpleNamespace

from distman._workers import server_process

from ..launch.preloaded import PYTHON, server_variables

PROGRAM = """
import json, os
from distman._workers.fork_server import main
control, _, *rest = json.loads(sys.argv[1])
main(control, os.getppid(), *rest)  # the preloaded interpreter, in place of the program
os._exit(0)
"""
FORK_SERVERS = f"""
from types import SimpleNamespace
from distman._workers import server_process

server_process.sys = SimpleNamespace(executable={str(PYTHON)!r})
server_process._PROGRAM = {PROGRAM!r}
"""
"""The first lines of a program, started with `server_variables`, whose servers are forks."""


def fork_servers(patch):
    """Let the servers that this process starts be forks, which need not import torch."""
    for name, value in server_variables().items():
        patch.setenv(name, value)
    patch.setattr(server_process, "sys", SimpleNamespace(executable=str(PYTHON)))
    patch.setattr(server_process, "_PROGRAM", PROGRAM)
