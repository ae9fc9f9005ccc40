"""The program of each rank of ``distman.run``: it calls a function from a pickle, and leaves what that returns."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from distman._base.interpreter import program

CALL = "call"
"""The file with a pickle of function, arguments and keyword arguments."""

_PROGRAM = """
from pathlib import Path
from distman._cli.run.call import main
main(Path(sys.argv[1]))
"""


def call_in(folder: Path) -> tuple[str, ...]:
    """Return what the interpreter of a rank is told to call what is in a folder."""
    return (*program(_PROGRAM), str(folder))


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def main(folder: Path) -> None:
    function, args, kwargs = pickle.loads((folder / CALL).read_bytes())  # noqa: S301 - the starter's, in its own folder
    result = function(*args, **kwargs)
    from distman._workers.pickling import ModulePickler

    with result_file(folder, int(os.environ["RANK"])).open("wb") as file:
        ModulePickler(file).dump(result)
