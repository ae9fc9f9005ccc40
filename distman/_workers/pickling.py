"""Pickling for another process of the same program."""

from __future__ import annotations

import importlib
import io
import sys
from types import CodeType, ModuleType
from typing import Any

import cloudpickle


class ModulePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Takes lambdas, closures and what ``__main__`` defines by value, with their files, and every module by name."""

    # cloudpickle itself takes a module of a class of its own, such as ``torch.backends.cudnn``, for a mere object, and
    # fails; and from 3.1.3 on it replaces the name of the file, which messages and tracebacks show.

    @classmethod
    def dumps(cls, value: object, **options: Any) -> bytes:
        file = io.BytesIO()
        cls(file, **options).dump(value)
        return file.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and obj is sys.modules.get(obj.__name__):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CodeType):
            _, arguments = self.dispatch_table[CodeType](obj)
            return _code, (obj.co_filename, *arguments)
        return super().reducer_override(obj)


def _code(filename: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=filename)
