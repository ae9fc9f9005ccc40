"""Arguments that a checkpoint has for a model's class and the like, on their way through a call that hands them on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from distman.errors import CheckpointError


def saved_arguments(saved: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a checkpoint for what a function hands them on to."""
    kinds = {name: one.kind for name, one in inspect.signature(function).parameters.items()}
    own = {name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD}
    if meant := sorted(own & saved.keys()):
        raise CheckpointError(
            f"the arguments in a checkpoint must be for the class that it names, got {', '.join(meant)} for "
            f"{function.__name__}. Do not trust its source."
        )
    return dict(saved)
