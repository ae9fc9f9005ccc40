"""The modules of distman that the server has imported: a fork that imports one gets it as it is.

Running them takes 0.1 s of a core. Only what the import does to its process is done anew, in each fork.
"""

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections import defaultdict
from types import ModuleType

PACKAGE = "distman"
MORE = (
    "distman._cli.run.command",
    "distman._cli.check.command",
    "distman._cli.keep.command",
    "distman.checkpoint._sharded",
)
modules: "dict[str, ModuleType]" = {}
specs: "dict[str, importlib.machinery.ModuleSpec]" = {}
imported_by: "dict[str, dict[str, None]]" = defaultdict(dict)
"""What each module imports at its top, in order: it stands in `sys.modules` beside it, as if it had run."""


def preload() -> None:
    """Import the package, then hide it from the programs that do not ask for it."""
    before, hook = set(sys.modules), sys.excepthook
    with recorded():
        package = importlib.import_module(PACKAGE)
        at_first = dict(vars(package))
        for name in dir(package):
            getattr(package, name)
        for name in MORE:
            importlib.import_module(name)
    sys.excepthook = hook
    for name in vars(package).keys() - at_first:
        delattr(package, name)  # it loads them when they are asked for
    modules.update((name, sys.modules.pop(name)) for name in sys.modules.keys() - before if is_part(name))
    specs.update((name, module.__spec__) for name, module in modules.items())
    sys.meta_path.insert(0, Finder())


def is_part(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


@contextlib.contextmanager
def recorded():
    """Note what the modules of the package import of it."""
    original = builtins.__import__

    def record(name, globals=None, locals=None, fromlist=(), level=0):
        result = original(name, globals, locals, fromlist, level)
        importer = (globals or {}).get("__name__", "")
        if is_part(importer):
            absolute = importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__"))
            for part in [absolute, *(f"{absolute}.{one}" for one in fromlist or ())]:
                if is_part(part) and part in sys.modules:
                    imported_by[importer][part] = None
        return result

    builtins.__import__ = record
    try:
        yield
    finally:
        builtins.__import__ = original


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the package, but where the path of the program leads to another copy of it."""

    def find_spec(self, name, path, _target=None):
        if name not in modules:
            return None
        if name == PACKAGE:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is None or found.origin != modules[name].__file__:
                sys.meta_path.remove(self)
                return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=modules[name].__file__)
        spec.submodule_search_locations = getattr(modules[name], "__path__", None)
        return spec

    def create_module(self, spec):
        return modules[spec.name]

    def exec_module(self, module):
        module.__spec__ = specs[module.__name__]
        as_it_was = dict(vars(module))
        for name in imported_by[module.__name__]:
            importlib.import_module(name)
        vars(module).update(as_it_was)  # a submodule has taken the place of its function of the same name
        if module.__name__ == "distman._coordination.failure.hook":
            module._IMPORTED_IN = os.getpid()
        if module.__name__ == "distman.environments._registry":
            module.LAUNCHERS._is_discovered = False  # the path of the program may lead to other entry points
        if module.__name__ == PACKAGE:
            module._startup.watch()
