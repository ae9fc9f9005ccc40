"""A fixed part of what `python -m tests.explore` explores without an end."""

import sys
from itertools import islice

import pytest

from tests.explore.cases import FAULTS, Case, draw
from tests.explore.judge import judge
from tests.explore.observe import run
from tests.explore.starters import STARTERS

from .conftest import require_namespaces

SEED = 748  # each fault is drawn once
FOUND = (  # once, by other seeds
    "launcher=env hosts=1 ranks=3 fault=sys.exit(0)@collective:2 around=finally",
    "launcher=env hosts=1 ranks=3 fault=raise-and-wait@barrier:0 around=thread",
    "launcher=env hosts=1 ranks=3 fault=raise-and-wait@collective:2 around=asyncio",
    "launcher=env hosts=1 ranks=3 fault=sys.exit(3)@on_rank:2 around=bare",
    "launcher=env hosts=1 ranks=2 fault=sys.exit(3)@on_rank:0 around=callback",
    "launcher=env hosts=1 ranks=3 fault=sys.exit(0)@barrier:1 around=retry",
    "launcher=env hosts=1 ranks=6 fault=memory-limit@start:0 around=plain",
    "launcher=env hosts=2 ranks=3 fault=raise-in-worker@on_rank:2,raise@on_rank:1 around=callback",
    "launcher=env hosts=1 ranks=2 fault=full-disk@save:0 around=acknowledge",
    "launcher=srun hosts=1 ranks=4 fault=full-disk@save:0,SIGSTOP@save:2 around=plain",
    "launcher=mpich hosts=2 ranks=2 fault=memory-limit@python:1 around=acknowledge",
    "launcher=mpich hosts=2 ranks=2 fault=os._exit(3)@python:1 around=acknowledge",
    "launcher=srun hosts=2 ranks=4 fault=GIL@python:1 around=notebook",
    "launcher=srun hosts=1 ranks=3 fault=os._exit(3)@collective:0 around=finally",
    "launcher=env hosts=2 ranks=2 fault=link-down@python:0 around=acknowledge",
    "launcher=env hosts=1 ranks=3 fault=raise-full-stderr@collective:0 around=acknowledge",
    "launcher=intel-mpi hosts=2 ranks=2 fault=sys.exit(0)@start:0 around=plain",
    "launcher=env hosts=1 ranks=4 fault=raise@collective:0 around=files",
    "launcher=env hosts=1 ranks=3 fault=sys.exit(0)@collective:0 around=save",
    "launcher=env hosts=1 ranks=4 fault=memory-limit@save:2 around=finally",
)


CASES = [Case.parse(line) for line in FOUND]
TRIED = {fault.name for case in CASES for fault in case.faults}


@pytest.mark.parametrize(
    "case", [*CASES, *(case for case in islice(draw(SEED), len(FAULTS)) if case.faults[0].name not in TRIED)], ids=str
)
def test_a_case_keeps_the_promises(request, case):
    if case.hosts > 1:
        require_namespaces()
    outcome = run(case, request.getfixturevalue(STARTERS[case.launcher].fixture))
    sys.stdout.write(f"python -m tests.explore --case '{case}'\n{outcome}\n")  # pytest shows it when the test fails
    assert judge(case, outcome) == []
