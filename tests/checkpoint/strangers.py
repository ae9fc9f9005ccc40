"""Checkpoints as a stranger may write them, read in this process: ``python -m tests.checkpoint.strangers --tries 999``.

It says what reading them has done here beside reading: attributes of classes and modules that have changed, files
opened elsewhere, imports, and what was started.
"""

import abc
import argparse
import enum
import gc
import pickle
import random
import secrets
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import torch
import torch._subclasses.schema_check_mode  # imported late by torch, as is the one after next
import torch.distributed.tensor  # it lets torch make more out of files
import torch.nested._internal.ops
from safetensors.torch import load_file, save_file

from distman import CheckpointError
from distman.checkpoint import save
from distman.checkpoint._contents import checksum, read_contents
from distman.checkpoint._location import locate
from distman.checkpoint._sharded import save_sharded
from distman.checkpoint._state import read_state

KINDS = ("contents", "file", "old file", "safetensors")
_STATE = {"weights": [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16)], "step": 7, "name": "run"}
_HOSTILE = [
    ("os", "system"),
    ("builtins", "setattr"),
    ("builtins", "getattr"),
    ("builtins", "exec"),
    ("builtins", "__import__"),
    ("importlib", "import_module"),
    ("pathlib", "Path.touch"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("subprocess", "Popen"),
    ("planted", "planted"),
    ("torch.hub", "load"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    ("torch.storage", "UntypedStorage"),
    ("torch.nn.parameter", "Parameter"),
    ("torch", "Tensor"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
]


_OWNERS = {type(sys), type, abc.ABCMeta, enum.EnumMeta, type(torch.Tensor)}
_CACHES = {"__abstractmethods__", "__annotations__", "__warningregistry__"}


class Writer:
    """Writes pickles at random, of everything that pickles can say: names, calls, attributes, items, extensions.

    Args:
        draw: Draws.
        names: Modules and names to use beside hostile ones.
    """

    def __init__(self, draw, names):
        self._draw, self._names = draw, names

    def pickle(self):
        kind = self._draw.choice([self._value, self._with_state, self._with_state])
        return pickle.PROTO + b"\2" + kind(0) + pickle.STOP

    def _value(self, depth):
        kinds = [self._plain, self._name] if depth > 4 else [
            self._plain, self._tuple, self._list, self._dict, self._call, self._new, self._object,
            self._instance, self._with_state, self._with_state, self._with_state, self._with_items, self._extension,
            self._persistent,
        ]  # fmt: skip
        return self._draw.choice(kinds)(depth + 1)

    def _plain(self, _):
        return self._draw.choice(
            [
                pickle.NONE,
                pickle.NEWTRUE,
                pickle.BININT1 + b"\7",
                self._text("torch.strided"),
                self._text("evil"),
                pickle.EMPTY_TUPLE,
            ]
        )

    def _any_name(self):
        """Return mostly what readers expect: at the first hostile one they stop."""
        return self._draw.choice(_HOSTILE if self._draw.random() < 0.1 else self._names)

    def _text(self, text):
        data = text.encode()
        return pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def _name(self, _):
        module, name = self._any_name()
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()

    def _several(self, depth):
        return b"".join(self._value(depth) for _ in range(self._draw.randrange(3)))

    def _tuple(self, depth):
        return pickle.MARK + self._several(depth) + pickle.TUPLE

    def _list(self, depth):
        return pickle.EMPTY_LIST + pickle.MARK + self._several(depth) + pickle.APPENDS

    def _dict(self, depth):
        names = ["__class__", "__setstate__", "__reduce__", "relative_path", "evil", "cwd", "_accessor", "offset"]
        items = [self._text(self._draw.choice(names)) + self._value(depth) for _ in range(self._draw.randrange(1, 3))]
        return pickle.EMPTY_DICT + pickle.MARK + b"".join(items) + pickle.SETITEMS

    def _call(self, depth):
        return self._name(depth) + self._tuple(depth) + pickle.REDUCE

    def _new(self, depth):
        return self._name(depth) + self._tuple(depth) + pickle.NEWOBJ

    def _object(self, depth):
        return pickle.MARK + self._name(depth) + self._several(depth) + pickle.OBJ

    def _instance(self, depth):
        module, name = self._any_name()
        return pickle.MARK + self._several(depth) + pickle.INST + f"{module}\n{name}\n".encode()

    def _with_state(self, depth):
        """Set attributes: of what a name stands for, too, and by the second of two dicts, which plain pickle sets."""
        target = self._draw.choice([self._name, self._name, self._new, self._call, self._value])(depth)
        state = self._dict(depth)
        if self._draw.random() < 0.6:
            state = self._draw.choice([pickle.NONE, state]) + state + pickle.TUPLE2
        return target + state + pickle.BUILD

    def _with_items(self, depth):
        end = self._draw.choice([pickle.SETITEMS, pickle.APPENDS, pickle.ADDITEMS])
        return self._value(depth) + pickle.MARK + self._several(depth) + end

    def _extension(self, _):
        return pickle.EXT1 + b"\1"

    def _persistent(self, depth):
        return self._value(depth) + pickle.BINPERSID


class Folder:
    """Good checkpoints of all kinds, and how others are put into their place.

    Args:
        path: Where they are.
    """

    def __init__(self, path):
        self.path = path
        save(_STATE, path / "state.pt")
        with (path / "old.pt").open("wb") as file:
            torch.save(_STATE, file, _use_new_zipfile_serialization=False)
        save_file({"weight": torch.arange(6.0)}, path / "state.safetensors")
        save_sharded({**_STATE, "nested": {"a": [torch.zeros(2), 1]}}, path / "sharded")
        self.table = path / "sharded" / "contents.jsonl"
        self.good = {
            "contents": self.table.read_bytes().partition(b"\n")[0],  # without the checksum, which put() adds
            "file": zipfile.ZipFile(path / "state.pt").read("archive/data.pkl"),
            "old file": (path / "old.pt").read_bytes(),
            "safetensors": (path / "state.safetensors").read_bytes(),
        }

    def names(self):
        """Modules and names that are used in an archive."""
        found = [("torch._utils", "_rebuild_tensor_v2"), ("torch", "FloatStorage"), ("torch", "Size")]
        return [*found, ("torch.serialization", "_get_layout"), ("torch", "float32")]

    def put(self, kind, content):
        if kind == "file":
            with zipfile.ZipFile(self.path / "state.pt") as old:
                others = {one.filename: old.read(one) for one in old.infolist() if not one.filename.endswith(".pkl")}
            with zipfile.ZipFile(self.path / "read.pt", "w") as new:
                new.writestr("archive/data.pkl", content)
                for name, data in others.items():
                    new.writestr(name, data)
        elif kind == "contents":
            self.table.write_bytes(content + b"\n" + checksum(content))
        else:
            (self.path / ("read.pt" if kind == "old file" else "read.safetensors")).write_bytes(content)

    def read(self, kind):
        if kind == "contents":
            read_contents(locate(self.table.parent))
        elif kind == "safetensors":
            load_file(self.path / "read.safetensors")
        else:
            read_state(locate(self.path / "read.pt"), torch.device("cpu"))


def mutated(draw, content):
    """Some bytes changed, removed, moved or repeated."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place, length = draw.randrange(len(found)), draw.randrange(1, 30)
        change = draw.randrange(4)
        if change == 0:
            found[place] ^= 1 << draw.randrange(8)
        elif change == 1:
            found[place] = draw.randrange(256)
        elif change == 2:
            del found[place : place + length]
        else:
            other = draw.randrange(len(found))
            found[place:place] = found[other : other + length]
        if not found:
            return bytes(content[:1])
    return bytes(found)


def attributes():
    """The attributes of all modules and classes, by their owner: which object each is."""
    owners = {id(one): one for one in [*sys.modules.values(), *gc.get_objects()] if type(one) in _OWNERS}
    return {
        number: (str(one), {name: id(value) for name, value in list(vars(one).items()) if name not in _CACHES})
        for number, one in owners.items()
        if "torch.ops" not in str(one)  # what torch looks up in it, it keeps
    }


class Watch:
    """Notes what this process does beside reading files of a folder.

    Args:
        folder: The folder.
    """

    _STARTS = (
        "subprocess.",
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "socket.",
        "ctypes.dlopen",
    )
    _CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "shutil.")

    def __init__(self, folder):
        self._folder, self.is_on, self.found = str(folder), False, Counter()
        sys.addaudithook(self._hear)

    def _hear(self, event, args):
        if not self.is_on:
            return
        if event == "open" and not str(args[0]).startswith(self._folder):
            self.found[f"opened {args[0]}"] += 1
        elif event == "import" and args[0] not in sys.modules:
            self.found[f"imported {args[0]}"] += 1
        elif event == "exec" or event.startswith((*self._STARTS, *self._CHANGES)):
            self.found[f"{event} {args}"] += 1


def run(tries, seed, folder):
    """Read many checkpoints, and return how each kind ended, and what reading has done beside."""
    draw, place = random.Random(seed), Folder(folder)  # noqa: S311 - tries are to be drawn again
    warnings.simplefilter("ignore")  # to show one, Python reads the file that it is about
    watch, ends = Watch(folder), Counter()
    "\u0100".encode("raw_unicode_escape")
    for kind in KINDS:  # what is imported or made once, is now
        for content in (place.good[kind], place.good[kind][:20]):
            place.put(kind, content)
            _try(place, kind, ends)
    ends.clear()
    before = attributes()
    writer = Writer(draw, place.names())
    for number in range(tries):
        kind = draw.choice(KINDS)
        is_crafted = number % 5 == 0 and kind == "file"
        place.put(kind, writer.pickle() if is_crafted else mutated(draw, place.good[kind]))
        watch.is_on = True
        _try(place, kind, ends)
        watch.is_on = False
    return ends, [*watch.found, *_changes(before, attributes())]


def _try(place, kind, ends):
    try:
        place.read(kind)
    except CheckpointError:
        ends[f"{kind}: refused"] += 1
    except Exception as error:  # noqa: BLE001 - it is counted
        ends[f"{kind}: {type(error).__name__}"] += 1
    else:
        ends[f"{kind}: read"] += 1


def _changes(before, after):
    for number, (owner, names) in before.items():
        found = after.get(number, (owner, names))[1]
        for name in names.keys() | found.keys():
            if names.get(name) != found.get(name):
                yield f"{owner} has another {name}"


def main():
    """Read as many as asked for, and return whether reading has done anything else."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ends, found = run(options.tries, options.seed, Path(folder))
    print(f"seed {options.seed}, {options.tries} tries:", dict(sorted(ends.items())))  # noqa: T201 - what it is for
    print("\n".join(["beside reading:", *found]) if found else "nothing was done but reading")  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
