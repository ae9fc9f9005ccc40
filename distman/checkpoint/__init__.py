"""Saving and loading the state of a training, so that no saved checkpoint is lost."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# What is imported as itself is for other parts of the package.
from distman.checkpoint._folder import (
    CheckpointFolder,
    check_writable as check_writable,
    is_sharded as is_sharded,
    read_latest as read_latest,
)
from distman.checkpoint._location import locate as locate
from distman.checkpoint._model_state import load_model_state, model_state, without_compiled as without_compiled
from distman.checkpoint._single_file import PendingSave, load, save
from distman.checkpoint._state import (
    check_state as check_state,
    map_state as map_state,
    read_plain as read_plain,
    without_unused_memory as without_unused_memory,
    write_safetensors as write_safetensors,
)

if TYPE_CHECKING:
    from distman.checkpoint._sharded import load_sharded, save_sharded, saved_tensors as saved_tensors

__all__ = [
    "CheckpointFolder",
    "PendingSave",
    "load",
    "load_model_state",
    "load_sharded",
    "model_state",
    "save",
    "save_sharded",
]


def __getattr__(name: str) -> Any:
    if name not in ("load_sharded", "save_sharded", "saved_tensors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("distman.checkpoint._sharded"), name)  # torch's part of it takes a second


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
