"""Each text of the page of messages is in the programs that print it."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from distman import errors

from ..test_docs import REPOSITORY

PAGE = REPOSITORY / "docs" / "messages.md"
ACROSS_LINES = re.compile(rb'" *\n *f?"')


def texts(section):
    """Return the headings of a section of the page."""
    _, _, rest = PAGE.read_text().partition(f"\n## {section}\n")
    return [text.encode() for text in re.findall(r"^### `(.+)`$", rest.partition("\n## ")[0], re.MULTILINE)]


def missing(section, files):
    """Return the texts of a section that are in none of the files."""
    sought = set(texts(section))
    for file in files:
        if not sought:
            break
        content = file.read_bytes()
        if file.suffix == ".py":
            content = ACROSS_LINES.sub(b"", content)
        sought = {text for text in sought if text not in content}
    return sought


def files_below(*folders):
    return [file for folder in folders for file in folder.rglob("*") if file.is_file()]


def test_the_page_has_many_texts():
    assert sum(len(texts(section)) for section in re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)) > 60


def test_each_exception_of_this_package_is_on_the_page():
    table = PAGE.read_text().partition("\n## By exception\n")[2].partition("\n## ")[0]
    assert {*errors.__all__} - {*re.findall(r"`(\w+)`", table)} == set()


def test_each_text_of_this_package_is_in_it():
    assert missing("Of distman", (REPOSITORY / "distman").rglob("*.py")) == set()


def test_each_text_of_torch_is_in_it():
    folder = Path(torch.__file__).parent
    python = sorted(folder.rglob("*.py"), key=lambda file: "distributed" not in file.parts)  # where most of them are
    assert missing("Of torch and gloo", [*python, *folder.glob("lib/*.so*")]) == set()


def test_each_text_of_the_system_is_in_it():
    libraries = re.findall(r"/\S+/libc\S*\.so\S*", Path("/proc/self/maps").read_text())
    assert missing("Of the system", map(Path, set(libraries))) == set()


def test_each_text_of_python_is_in_it():
    folder = Path(os.__file__).parent
    assert missing("Of Python", [folder / "pickle.py", *folder.glob("multiprocessing/*.py")]) == set()


@pytest.mark.usefixtures("slurm_of_the_session")
def test_each_text_of_slurm_is_in_it():
    programs = [Path(path) for path in map(shutil.which, ["srun", "sbatch", "slurmctld", "slurmstepd"]) if path]
    libraries = Path("/usr/lib").glob("*/slurm-wlm/*.so")
    assert missing("Of Slurm", [*programs, *libraries]) == set()


def test_each_text_of_open_mpi_is_in_it(openmpi):
    assert missing("Of Open MPI", files_below(openmpi.directory / "share")) == set()


def test_each_text_of_hydra_is_in_it(mpich, intel_mpi):
    assert missing("Of MPICH and Intel MPI", files_below(mpich.directory / "bin", intel_mpi.directory / "bin")) == set()


@pytest.mark.parametrize("section", ["Of distman", "Of torch and gloo"])
def test_what_nobody_prints_would_be_found(section):
    assert missing(section, [PAGE.with_name("index.md")]) != set()
