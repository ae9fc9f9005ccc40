"""Coverage, which its own plugin counts in the pytest process only."""

import json

MEASURED = """
def own_path(rank):
    if rank == 0:
        return "first"
    return "other"

def never():
    return "nowhere"
"""
COVERED = """
import measured
from distman.testing import ranks

@ranks(2)
def test_first(rank):
    assert measured.own_path(rank) == ["first", "other"][rank]

@ranks(3, dies=[2])
def test_after_a_rank_died(rank):
    import os
    if rank == 2:
        os._exit(1)
"""


def test_lines_that_run_in_the_workers_are_counted(project):
    (project.folder / "measured.py").write_text(MEASURED)
    project.write(COVERED, "test_covered.py")
    run = project.run("-q", "test_covered.py", "--cov=measured", "--cov-report=json", "--cov-branch")
    assert run.counts() == {"passed": 2}, run.output
    lines = json.loads((project.folder / "coverage.json").read_text())["files"]["measured.py"]
    assert lines["missing_lines"] == [8]
    assert lines["missing_branches"] == []
    assert not list(project.folder.glob(".coverage.*")), run.output
