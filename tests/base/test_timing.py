"""All seconds of the package are in one table, and those that depend on each other fit together."""

import ast
import re
from pathlib import Path

import pytest

import distman
from distman._base import timing

PACKAGE = Path(distman.__file__).parent
OF_TIME = re.compile(r"PATIENCE|PAUSE|GRACE|STAY|TIMEOUT|LIMIT|INTERVAL|EVERY|QUIET|SECONDS")


@pytest.mark.parametrize(("longer", "shorter"), timing.LONGER)
def test_what_waits_for_another_time_is_at_least_as_long(longer, shorter):
    assert longer >= shorter > 0


def constants_of_seconds(source):
    """Return the names of a module that are floating-point numbers, and seconds by their name or comment."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, float)
        ):
            name, comment = ast.unparse(node.targets[0]), lines[node.lineno - 1].partition("#")[2]
            if OF_TIME.search(name) or comment.startswith(" seconds"):
                yield name


def test_no_other_module_has_seconds_of_its_own():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path != Path(timing.__file__)
        for name in constants_of_seconds(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("_PAUSE = 0.1", ["_PAUSE"]),
        ("SLOW = 2.0  # seconds for something", ["SLOW"]),
        ("_LOOKS_WITHOUT_PAUSE = 8", []),
        ("_GROWTH = 1.5  # per pause", []),
    ],
)
def test_seconds_are_known_by_name_or_comment(source, expected):
    assert [*constants_of_seconds(source)] == expected
