"""With this folder on PYTHONPATH, mpi4py cannot be imported, nor found by `importlib.util.find_spec`."""

import sys

sys.modules["mpi4py"] = None  # type: ignore[assignment]
