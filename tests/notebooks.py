"""Cells of a notebook, run by a real kernel."""

import json
import os
import subprocess
import sys

# In a process of its own, since nbclient takes over SIGINT and SIGTERM and turns them into a CancelledError; over
# sockets in the current folder, since a free port that was found may be taken before the kernel listens.
NOTEBOOK = """
import json, sys
import nbclient, nbformat
from traitlets.config import Config

cells = [nbformat.v4.new_code_cell(cell) for cell in json.loads(sys.argv[1])]
config = Config(KernelManager={"transport": "ipc"})
nbclient.NotebookClient(
    nbformat.v4.new_notebook(cells=cells), timeout=60, kernel_name="python3", config=config
).execute()
print(json.dumps([output for cell in cells for output in cell.outputs]))
"""


def outputs_of_cells(cells, folder):
    """Run the cells of a notebook, and return their outputs.

    Args:
        cells: Their sources.
        folder: An empty one, for what the kernel writes.
    """
    environ = {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, json.dumps(cells)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
