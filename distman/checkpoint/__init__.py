"""Saving and loading the state of a training, so that no saved checkpoint is lost."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distman.checkpoint._folder import CheckpointFolder
from distman.checkpoint._location import register_storage
from distman.checkpoint._model_state import load_model_state, model_state
from distman.checkpoint._single_file import PendingSave, load, save
from distman.checkpoint._storage import NewFolder, Storage

if TYPE_CHECKING:
    from distman.checkpoint._sharded import load_sharded, save_sharded

__all__ = [
    "CheckpointFolder",
    "NewFolder",
    "PendingSave",
    "Storage",
    "load",
    "load_model_state",
    "load_sharded",
    "model_state",
    "register_storage",
    "save",
    "save_sharded",
]


def __getattr__(name: str) -> Any:
    if name not in ("load_sharded", "save_sharded"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("distman.checkpoint._sharded"), name)  # torch's part of it takes a second


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
