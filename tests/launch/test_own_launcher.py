"""A launcher that distman does not bring along, as the page of launchers shows it: ranks started by hand."""

import json
import os
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from .preloaded import PYTHON
from .processes import launch, start
from .test_docs import REPOSITORY, scripts

SCRIPT = Path(__file__).parent / "scripts" / "own_launcher.py"
LIMIT = 60


@pytest.fixture
def site(tmp_path):
    """A folder with the module of the documentation."""
    (module,) = (one.text for one in scripts(REPOSITORY / "docs" / "detection.md") if "register_launcher(" in one.text)
    (tmp_path / "ourrun.py").write_text(module)
    return tmp_path


def install(site):
    """Make a package of the module that names it as an entry point."""
    info = site / "ourrun-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ourrun\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[distman.launchers]\nourrun = ourrun\n")


def variables(site, rank):
    place = {"OURRUN_RANK": rank, "OURRUN_SIZE": 2, "OURRUN_LOCAL_RANK": rank, "OURRUN_LOCAL_SIZE": 2}
    return {name: str(value) for name, value in place.items()} | {"PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}"}


@pytest.mark.parametrize("is_installed", [False, True], ids=["imported", "entry point"])
def test_two_ranks_find_each_other_and_sum(site, is_installed):
    if is_installed:
        install(site)
    command = [PYTHON, SCRIPT, *([] if is_installed else ["ourrun"])]
    job = {"OURRUN_JOB": uuid.uuid4().hex}
    with ExitStack() as stack:
        ranks = [stack.enter_context(start(command, env=job | variables(site, rank))) for rank in range(2)]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [(rank.returncode, rank.stderr) for rank in finished] == [(0, ""), (0, "")]
    assert [json.loads(rank.stdout) for rank in finished] == [["ourrun", 0, 3], ["ourrun", 1, 3]]


def test_the_command_line_knows_it_by_its_entry_point(site):
    install(site)
    command = [PYTHON, "-m", "distman", "env", "--json"]
    found = json.loads(launch(command, env=variables(site, 1), timeout=LIMIT).stdout)
    assert (found["launcher"], found["rank"], found["world_size"]) == ("ourrun", 1, 2)
    assert "slurm was passed over" in " ".join(found["explanation"])
