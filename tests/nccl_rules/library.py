"""The compiled backend: made on demand, once for each version of its source and of torch, outside of the source tree.

It takes half a minute, so pytest starts this module as a program of its own when it has collected a test that needs
the library. torch's own builder would import torch in it, want ninja, and leave a lock behind when it is killed.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "nccl_rules_backend"
_SOURCE = Path(__file__).with_name("backend.cpp")


def build() -> Path:
    """Return the library; compile it unless that is done, and wait while another process does."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    ingredients = [
        _SOURCE.read_bytes(),
        Path(__file__).read_bytes(),
        (torch / "version.py").read_bytes(),
        sys.version.encode(),
    ]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "distman-tests" / hashlib.sha256(b"".join(ingredients)).hexdigest()[:16]
    library = folder / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            _compile(torch, unfinished)
            unfinished.rename(library)
    return library


def _compiled_with() -> dict[str, str]:
    """Return what torch says of the compiler of its Python bindings, if it does."""
    import torch

    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    found = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _compile(torch: Path, target: Path) -> None:
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = ["torch_python", "torch", "torch_cpu", "c10"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC"]  # what takes long here is to wait for other ranks
    # Only what was compiled alike shares classes with torch, which may have been compiled by another compiler.
    flags += [f'-DPYBIND11_{name}="{value}"' for name, value in _compiled_with().items()]
    included = [part for folder in headers for part in ("-isystem", str(folder))]
    linked = [f"-L{torch / 'lib'}", *[f"-l{library}" for library in libraries]]
    subprocess.run(
        [os.environ.get("CXX", "g++"), *flags, *included, str(_SOURCE), "-o", str(target), *linked], check=True
    )


if __name__ == "__main__":
    build()
