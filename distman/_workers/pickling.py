"""Pickling for another process of the same program."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import cloudpickle


class ModulePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Takes lambdas, closures and what ``__main__`` defines by value, and every module by name.

    cloudpickle itself takes a module of a class of its own, such as ``torch.backends.cudnn``, for a mere object, and
    fails.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and obj is sys.modules.get(obj.__name__):
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)
