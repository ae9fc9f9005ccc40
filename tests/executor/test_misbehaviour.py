"""One task of every kind of misbehaviour, in a random order that is the same each time; see ``misbehaviour.py``."""

from tests.executor.misbehaviour import KINDS, run


def test_every_future_has_the_answer_of_its_own_task():
    wrong, counts = run(len(KINDS), seed=0)
    assert (wrong, counts.keys()) == ([], KINDS.keys())
