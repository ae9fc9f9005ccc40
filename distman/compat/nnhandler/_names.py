"""What is not kept of NNHandler, and what to write instead."""

from __future__ import annotations

from distman._base.moved_names import refusals

REFUSED = refusals("NNHandler")  # names of the package
REFUSED_METHODS = refusals("NNHandler.NNHandler")
_REFUSED_ARGUMENTS = refusals("arguments of NNHandler")


def refuse(**arguments: object) -> None:
    """Raise for an argument that is given and cannot be kept, and say what to write instead."""
    for name, value in arguments.items():
        if value:
            raise TypeError(f"{name} must be left out, got {value!r}. {_REFUSED_ARGUMENTS[name]}")
