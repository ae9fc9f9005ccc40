"""The program of each rank of ``distman.run``: it calls a function from a pickle, and leaves what that returns.

``python -m distman._run.call FOLDER``
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

CALL = "call"
"""The file with a pickle of search path, function, arguments and keyword arguments."""


def result_file(folder: Path, rank: int) -> Path:
    """Return the file with what the function has returned on a rank, as a pickle."""
    return folder / f"result-{rank}"


def main(folder: Path) -> None:
    """Call the function."""
    search_path, call = pickle.loads((folder / CALL).read_bytes())  # noqa: S301 - the starter's, in a folder of its own
    sys.path[:] = search_path
    function, args, kwargs = pickle.loads(call)  # noqa: S301 - the same
    result = function(*args, **kwargs)
    from distman._workers.pickling import ModulePickler

    with result_file(folder, int(os.environ["RANK"])).open("wb") as file:
        ModulePickler(file).dump(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
