"""The lists of every name on the page about moving: complete, and each new name is there."""

import importlib
import json
import re
from pathlib import Path

import pytest

from distman.testing import ranks
from tests.test_docs import PLACES, attribute, modules, read, target_of

NAMES = json.loads(read("docs/howto/moving_names.json"))
RECORDED = json.loads((Path(__file__).parent / "recorded_names.json").read_text(encoding="utf-8"))
"""Of a class its public methods and properties, of PartialState its state too; of a module what it offers."""
PHYSICSNEMO = ["", ".autograd", ".config", ".fft", ".fused_all_reduce", ".manager", ".mappings", ".utils"]


def test_each_list_is_on_the_page():
    on_page = re.findall(r"\.\. moved:: (\S+)", read("docs/howto/moving.md"))
    assert [name for name in on_page if not name.startswith("NNHandler")] == list(NAMES) == list(RECORDED)


@pytest.mark.parametrize("library", NAMES)
def test_every_old_name_has_a_new_one_or_a_reason(library):
    old = [name for row in NAMES[library] for name in row[0].split()]
    assert sorted(old) == sorted(RECORDED[library]["names"].split())
    for olds, new, note in NAMES[library]:
        assert new or note, olds
        for name in filter(None, new.split(", ")):
            if name in PLACES or name in modules():
                for one in olds.split():
                    attribute(target_of(name), one)
            else:
                assert target_of(name) is not None


@ranks(1)
def test_names_of_physicsnemo_are_in_its_place():
    homes = [importlib.import_module(f"distman.compat.physicsnemo{module}") for module in PHYSICSNEMO]
    names = RECORDED["physicsnemo.distributed"]["names"].split()
    assert [name for name in names if not any(hasattr(home, name) for home in homes)] == []
    manager = homes[0].DistributedManager()
    methods = RECORDED["physicsnemo.distributed.DistributedManager"]["names"].split()
    assert [name for name in methods if not hasattr(manager, name)] == []
