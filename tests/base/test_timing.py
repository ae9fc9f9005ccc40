"""All seconds of the package are in one table, and those that depend on each other fit together."""

import ast
import re
from pathlib import Path

import pytest

import distman
from distman._base import timing

PACKAGE = Path(distman.__file__).parent
OF_TIME = re.compile(r"PATIENCE|PAUSE|GRACE|STAY|TIMEOUT|LIMIT|INTERVAL|EVERY|QUIET|SECONDS")

LONGER = (
    (timing.GUEST, timing.DIAL),  # the store waits for a client for as long as that waits for the store
    (timing.DIAL, timing.DIAL_NEXT_ADDRESS),  # another address of the name has its turn
    (timing.OPEN_ENTRY, timing.JOIN_BESIDE_RANK_ZERO),  # the store outlives the last rank that tries to enter
    (timing.JOIN_PARTING_WITH_ALL, timing.JOIN_PARTING),
    (timing.RENDEZVOUS_TIMEOUT, timing.JOIN_PROGRESS_EVERY),  # the missing ranks are named before the ranks give up
    (timing.RENDEZVOUS_TIMEOUT, timing.WALLS_QUIET),
    (timing.RENDEZVOUS_TIMEOUT, timing.FIND_QUIET),
    # a host that is gone is found before the silence of its ranks
    (timing.SILENCE_TIMEOUT, timing.UNREACHABLE_UNWATCHED),
    (timing.SILENCE_TIMEOUT, timing.BENCH_COLLECTIVE),  # a slow operation ends the measurement, not the job
    (timing.HANG_TIMEOUT, timing.MUTUAL_WAIT),  # what cannot end is found before it is reported as a hang
    (timing.MUTUAL_WAIT, timing.WATCH_EVERY),
    (timing.WATCH_ANSWER, timing.WATCH_EVERY),  # a look falls into the time for which others wait for it
    (timing.STAY_TO_BE_READ, timing.WATCH_EVERY),
    (timing.DEPARTED, timing.WATCH_EVERY),  # a failure is known before a rank that left because of it is blamed
    (timing.WATCH_EVERY, timing.DELIVERY_EVERY),
    (timing.WATCH_EVERY, timing.KNOWN_PAUSE),
    (timing.GROUPS_END, timing.ABORT_GROUPS),
    (timing.JOINT_LIMIT, timing.JOINT_WAIT),
    (timing.JOINT_WAIT, timing.JOINT_RAISE),
    (timing.CANCEL, timing.STAY_TO_BE_READ),  # the other ranks have read why before they are ended
    (timing.FAILURE_GRACE_NATIVE, timing.FAILURE_GRACE),
    # what waits for parts of a checkpoint gives up before it is given up
    (timing.END_OF_WORK, timing.PARTS_AFTER_FAILURE),
    (timing.STRAGGLERS, timing.END_OF_WORK),
    (timing.STRAGGLERS, timing.FAILURE_GRACE),
    (timing.END_OF_PROCESS, timing.PRINT),  # an error is printed, and published, before its process is cut off
    (timing.END_OF_PROCESS, timing.PUBLISH),
    (timing.RUN_GRACE, timing.END_OF_PROCESS),  # a process ends itself, and says why, before it is killed
    (timing.STOP_MARGIN, timing.STOP_EVERY),
    (timing.SERVERS_END, timing.SERVER_END),
    (timing.TEST_GROUP_MARGIN, timing.TEST_RELEASE),  # a collective stays stuck until the report shows where
    (timing.TEST_GROUP_MARGIN, timing.TEST_STACKS),
)


@pytest.mark.parametrize(("longer", "shorter"), LONGER)
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
