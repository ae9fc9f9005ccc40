from pathlib import Path

LEFTOVERS = Path(__file__).with_name("leftovers.py")


def test_what_a_test_leaves_behind_is_gone_in_the_next(project):
    project.write(LEFTOVERS.read_text())
    run = project.run()
    assert run.counts() == {"passed": LEFTOVERS.read_text().count("\ndef test_")}, run.output
