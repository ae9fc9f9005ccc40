"""A line repeats a case, a seed repeats its cases, and what is drawn can be run."""

import pickle
from itertools import islice

import pytest

from .cases import AROUND, FAULTS, IN_THE_LOOP, LAUNCHERS, PLACES, Case, draw
from .faults import ACTIONS, TwoArgumentsError, UnpicklableError

LINE = "launcher=srun hosts=2 ranks=5 fault=SIGKILL@barrier:3 around=retry"
MANY = 2_000


def cases(seed, count=MANY):
    return list(islice(draw(seed), count))


def test_a_line_repeats_a_case():
    assert str(Case.parse(LINE)) == LINE
    for case in cases(0):
        assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("srun", "slurm"),
        ("hosts=2", "hosts=3"),
        ("ranks=5", "ranks=3"),
        ("barrier", "brier"),
        ("barrier", "native"),
        ("SIGKILL", "cut"),
        ("SIGKILL", "full-disk"),
        ("retry", "try"),
        (":3", ":3,SIGKILL@barrier:3"),
        (":3", ":3,raise@python:1"),
    ],
)
def test_a_line_that_is_no_case(old, new):
    with pytest.raises((ValueError, KeyError)):
        Case.parse(LINE.replace(old, new))


def test_a_seed_repeats_its_cases():
    assert cases(7, 50) == cases(7, 50) != cases(8, 50)


def test_each_fault_is_drawn_once_before_any_is_drawn_again():
    drawn = [case.faults[0].name for case in cases(3, 2 * len(FAULTS))]
    assert set(drawn[: len(FAULTS)]) == set(drawn[len(FAULTS) :]) == set(FAULTS)


def test_everything_is_drawn_and_nothing_twice():
    drawn = cases(1)
    assert len(set(drawn)) == MANY
    assert {case.launcher for case in drawn} == set(LAUNCHERS)
    assert {case.place for case in drawn} == set(PLACES)
    assert {case.around for case in drawn} == set(AROUND)
    assert {case.ranks for case in drawn} == set(range(2, 9))
    assert {(case.place, case.around) for case in drawn} >= {(p, a) for p in IN_THE_LOOP for a in AROUND}
    assert {(case.launcher, case.hosts) for case in drawn} == {
        (launcher, hosts) for launcher in LAUNCHERS for hosts in (1, 2)
    } - {("torchrun", 2)}
    assert {len(case.faults) for case in drawn} == {1, 2}


def test_the_ranks_that_may_be_named():
    assert Case.parse(LINE).guilty(0) == {3}
    cut = Case.parse("launcher=env hosts=2 ranks=5 fault=cut@python:0 around=plain")
    assert (cut.guilty(0), cut.guilty(4), cut.survivors) == ({3, 4}, {0, 1, 2}, [0, 1, 2, 3, 4])


def test_faults_are_what_they_are_called():
    assert ACTIONS.keys() == FAULTS.keys()
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(UnpicklableError("boom"))
    pickled = pickle.dumps(TwoArgumentsError("boom", 2))
    with pytest.raises(TypeError, match="argument"):
        pickle.loads(pickled)  # noqa: S301 - it is our own
