"""``import physicsnemo.distributed`` where physicsnemo is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

_MODULES = ("autograd", "config", "fft", "fused_all_reduce", "manager", "mappings", "utils")


def install() -> None:
    """Let ``import physicsnemo.distributed`` mean :mod:`distman.compat.physicsnemo` in this process.

    Local. Only for code that cannot be changed: else change its imports. A second call changes nothing.

    Raises:
        ImportError: physicsnemo is installed here, or imported, so its name is taken.

    Example:
        >>> install()
        >>> from physicsnemo.distributed import DistributedManager
        >>> DistributedManager.__module__
        'distman.compat.physicsnemo.manager'
    """
    name = "physicsnemo"
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        package = types.ModuleType(name, "Holds distman.compat.physicsnemo as its module ``distributed``.")
        package.__path__ = []
        distributed = sys.modules[__package__ or ""]
        package.distributed = distributed  # type: ignore[attr-defined]  # a module takes any attribute
        sys.modules.update({name: package, f"{name}.distributed": distributed})
        for module in _MODULES:
            full_name = f"{distributed.__name__}.{module}"
            sys.modules[f"{name}.distributed.{module}"] = importlib.import_module(full_name)
    elif getattr(sys.modules.get(name), "distributed", None) is not sys.modules[__package__ or ""]:
        raise ImportError(
            "physicsnemo must not be installed for distman to stand in for it, got one that is. Write "
            "distman.compat.physicsnemo in place of physicsnemo.distributed, or uninstall physicsnemo."
        )
