"""Whose a line of code is: the user's, this package's, torch's or Python's."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

_PACKAGE = f"{Path(__file__).parent.parent}/"
_LIBRARY = f"{Path(os.__file__).parent}/"  # Python's own, with what is installed in it


def is_internal(file: str) -> bool:
    """Return whether a file is one of this package or of torch, in which a user does not look for a mistake."""
    return file.startswith(internal_folders())


def is_of_package(file: str) -> bool:
    """Return whether a file is one of this package."""
    return file.startswith(_PACKAGE)


def is_of_user(file: str) -> bool:
    """Return whether a file belongs to none of these, nor to Python's own library."""
    is_of_python = file.startswith(_LIBRARY) and "-packages" not in file
    return not (is_of_python or is_internal(file))


@functools.lru_cache(maxsize=1)
def internal_folders() -> tuple[str, ...]:
    """Return the folders of this package and of torch."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_PACKAGE, f"{Path(torch).parent}/") if torch else (_PACKAGE,)
