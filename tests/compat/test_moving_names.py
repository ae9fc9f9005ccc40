"""The lists of every name on the page about moving: complete, and each new name is there."""

import importlib
import json
import re
from pathlib import Path

import pytest

from distman._base.moved_names import OPTIONS, read_tables
from distman._cli.parser import make_parser
from distman.testing import ranks
from tests.test_docs import PLACES, attribute, modules, read, target_of

# Those of NNHandler are in test_nnhandler.py.
NAMES = {library: rows for library, rows in read_tables().items() if "NNHandler" not in library}
OTHERS = {library: NAMES.pop(library) for library in ("others", OPTIONS)}  # in errors alone
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


@pytest.mark.parametrize("row", OTHERS["others"], ids=lambda row: row[0])
def test_names_that_no_list_has_lead_to_what_is_here(row):
    olds, new, note = row
    assert new or note
    assert not {name for rows in NAMES.values() for other, _, _ in rows for name in other.split()} & {*olds.split()}
    for name in filter(None, new.split(", ")):
        assert target_of(name) is not None


@pytest.mark.parametrize("row", OTHERS[OPTIONS], ids=lambda row: row[0])
def test_options_of_launchers_lead_to_what_distman_run_takes(row, capsys):
    olds, new, note = row
    for old in olds.split():
        with pytest.raises(SystemExit):
            make_parser().parse_args(["run", old, "2", "train.py"])
        assert f"; {f'here it is {new}' if new else note.replace('`', '')}" in capsys.readouterr().err
        if new:
            make_parser().parse_args(["run", *new.split(), *(["2"] if new in {"-n", "--log-dir"} else []), "train.py"])


@ranks(1)
def test_names_of_physicsnemo_are_in_its_place():
    homes = [importlib.import_module(f"distman.compat.physicsnemo{module}") for module in PHYSICSNEMO]
    names = RECORDED["physicsnemo.distributed"]["names"].split()
    assert [name for name in names if not any(hasattr(home, name) for home in homes)] == []
    manager = homes[0].DistributedManager()
    methods = RECORDED["physicsnemo.distributed.DistributedManager"]["names"].split()
    assert [name for name in methods if not hasattr(manager, name)] == []
