"""A selection of the fault matrix, and the proof that its judge can find fault."""

import itertools
import math
import pickle
import sys
from dataclasses import replace

import pytest

from .fault_cells import LAUNCHERS, RANKS, Cell, Outcome, Survivor, all_cells, judge, selection
from .fault_matrix import STARTERS, Results, run
from .fault_table import as_markdown, entry
from .scripts.fault import FAULTS, PLACES, TwoArgumentsError, UnpicklableError

DIMENSIONS = (LAUNCHERS, tuple(FAULTS), tuple(PLACES), RANKS)
MOST_CELLS = 60

NAMED = "RankFailedError: rank 2 (n3, pid 77) raised ValueError: boom"
BARRIER = Cell("srun", "raise", "in a barrier", 2)
LAST = Cell("srun", "raise", "after the last collective", 2)
EARLY = Cell("srun", "SIGKILL", "before initialize", 2)


@pytest.mark.parametrize("cell", selection(all_cells()), ids=str)
def test_cell_keeps_the_promises(request, cell):
    outcome = run(cell, request.getfixturevalue(STARTERS[cell.launcher].fixture))
    sys.stdout.write(f"{outcome}\n")  # pytest shows it when the test fails
    assert judge(cell, outcome) == []


def test_every_pair_of_values_is_selected():
    selected = [cell.values for cell in selection(all_cells())]
    assert len(selected) <= MOST_CELLS
    for (one, first), (other, second) in itertools.combinations(enumerate(DIMENSIONS), 2):
        for pair in itertools.product(first, second):
            assert any((values[one], values[other]) == pair for values in selected), pair


def test_all_cells_are_there_once():
    assert len(set(all_cells())) == len(all_cells()) == math.prod(map(len, DIMENSIONS))


def test_exceptions_are_what_they_are_called():
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(UnpicklableError("boom"))
    pickled = pickle.dumps(TwoArgumentsError("boom", 2))
    with pytest.raises(TypeError, match="argument"):
        pickle.loads(pickled)  # noqa: S301 - it is our own


def seen(*survivors, **more):
    """Return what is seen of a good cell, with the ends of the two survivors and other changes."""
    outcome = Outcome(
        host="n3",
        pid=77,
        has_failed=True,
        survivors=survivors or (ended(0), ended(1)),
        launcher_seconds=0.9,
        launcher_code=1,
        left_behind=(),
        said="",
        seconds=5.0,
    )
    return replace(outcome, **more)


def ended(rank=1, seconds=0.4, code=1, said=NAMED):
    return Survivor(rank, seconds, code, said)


def killed(rank=1, said=""):
    return ended(rank, code=None, said=said)


def done(rank=1):
    return ended(rank, code=0, said="")


@pytest.mark.parametrize(
    ("cell", "outcome"),
    [
        (BARRIER, seen()),
        (replace(BARRIER, launcher="torchrun"), seen(killed(0), killed(1))),
        (BARRIER, seen(ended(0), killed(1))),
        (replace(BARRIER, fault="SIGSTOP"), seen(ended(0, 11.0), ended(1, 9.0))),
        (replace(BARRIER, fault="sys.exit(0)", place="in Python code"), seen(ended(0, 21.0), ended(1, 21.0))),
        (BARRIER, seen(ended(0), ended(1, 8.2), delay=3.5)),
        (LAST, seen(done(0), done(1))),
        (LAST, seen(done(0), killed(1))),
        (replace(LAST, fault="sys.exit(0)"), seen(done(0), done(1), launcher_code=0)),
        (EARLY, seen(*(ended(rank, 8.5, said="missing: rank 2 (expected on n3)") for rank in (0, 1)))),
        (
            replace(EARLY, launcher="MPICH 5", fault="sys.exit(0)"),
            seen(*(ended(rank, 8.5, said="missing: rank 2. Present") for rank in (0, 1))),
        ),
    ],
)
def test_kept_promises(cell, outcome):
    assert judge(cell, outcome) == []


@pytest.mark.parametrize(
    ("cell", "outcome", "complaint"),
    [
        (BARRIER, seen(has_failed=False), "the fault must happen"),
        (BARRIER, seen(ended(0), ended(1, seconds=None)), "rank 1 hangs"),
        (BARRIER, seen(launcher_seconds=None, launcher_code=None), "the launcher hangs"),
        (BARRIER, seen(ended(0), ended(1, 5.2)), "rank 1 must end within 5 s, got 5.2 s"),
        (BARRIER, seen(ended(0), ended(1, 8.2), delay=3.0), "rank 1 must end within 5 s, got 8.2 s"),
        (replace(BARRIER, fault="SIGSTOP"), seen(ended(0), ended(1, 13.0)), "within 12 s"),
        (BARRIER, seen(ended(0), ended(1, said="RuntimeError: connection closed")), "got: RuntimeError: connection"),
        (BARRIER, seen(ended(0), ended(1, said=NAMED.replace("n3", "n2"))), "rank 1 must name"),
        (BARRIER, seen(ended(0), ended(1, said=NAMED.replace("rank 2", "rank 1"))), "rank 1 must name"),
        (BARRIER, seen(killed(0), killed(1)), "no survivor says why it ended"),
        (BARRIER, seen(ended(0), done(1)), "rank 1 must not end with 0"),
        (BARRIER, seen(launcher_code=0), "the launcher must not end with 0"),
        (BARRIER, seen(left_behind=("pid 5: python",)), "left behind: pid 5"),
        (BARRIER, seen(ended(0), killed(1, said="Fatal Python error: Aborted")), "rank 1 crashed"),
        (EARLY, seen(ended(0, 8.5, said="missing: rank 2"), killed(1)), "rank 0 must name"),
        (EARLY, seen(ended(0, 8.5, said="missing: rank 1 (expected on n3)"), killed(1)), "rank 0 must name"),
        (LAST, seen(done(0), ended(1)), "rank 1 was done and must end with 0, got 1"),
        (replace(LAST, fault="sys.exit(0)"), seen(done(0), done(1)), "the launcher must end with 0, got 1"),
    ],
)
def test_broken_promises(cell, outcome, complaint):
    (said,) = judge(cell, outcome)
    assert complaint in said


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (seen(), "0.4 s, 1"),
        (seen(launcher_seconds=30.6), "0.4 s + 30 s, 1"),
        (seen(ended(0), ended(1, said="")), "0.4 s, 1 \\*"),
        (seen(ended(0), ended(1, 6.0)), "6.0 s, 1 !"),
        (seen(ended(0), ended(1, seconds=None)), "hangs !"),
        (seen(has_failed=False), "no fault !"),
        (seen(launcher_seconds=None, launcher_code=None), "0.4 s, launcher hangs !"),
    ],
)
def test_entry_of_the_table(outcome, text):
    assert entry(BARRIER, outcome) == text


def test_results_are_kept_for_a_restart(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add(BARRIER, seen())
    results.add(LAST, seen(done(0), ended(1, seconds=None)))
    assert Results(results.path).outcomes == results.outcomes
    page = as_markdown(results.outcomes)
    assert "| raise | 2 |  |  |  | 0.4 s, 1 |  | hangs ! |" in page
    assert f"- {LAST}: `rank 1 hangs`" in page
