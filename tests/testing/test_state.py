import dataclasses
from pathlib import Path

from distman.testing._messages import RankTask

LEFTOVERS = Path(__file__).with_name("leftovers.py")


def test_what_a_test_leaves_behind_is_gone_in_the_next(project):
    project.write(LEFTOVERS.read_text())
    run = project.run()
    assert run.counts() == {"passed": LEFTOVERS.read_text().count("\ndef test_")}, run.output


def test_the_environment_of_a_rank_is_not_shown():
    assert [field.name for field in dataclasses.fields(RankTask) if not field.repr] == ["environ"]
