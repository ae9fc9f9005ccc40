"""What a user installs: a wheel from the source distribution, in an environment that holds nothing else.

What it requires is linked into that environment, not installed: to unpack torch takes a minute.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LIMIT = 400
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "_build", "*.egg-info", "__pycache__", ".*_cache")
IMPORT_ALL = """
import importlib, pkgutil, sys
import distman

for module in pkgutil.walk_packages(distman.__path__, "distman."):
    if module.name != "distman.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name.split(".")[1], error.name)
"""
ONE_PROCESS = """
from distman import DistributedManager

print(DistributedManager.initialize())
"""


def run(*command, cwd):
    """Run a program to its end and return what it printed."""
    __tracebackhide__ = True
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        pytest.fail(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def sources():
    """The files of the package, as the wheel names them."""
    files = (path for path in (ROOT / "distman").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def link_requirements(wheel, environment):
    """Let an environment hold what a wheel requires, and what that requires: what this one holds of it."""
    (site_packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        wanted = BytesParser().parsebytes(archive.read(about)).get_all("Requires-Dist")
    seen = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in seen or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        installed = metadata.distribution(requirement.name)
        wanted += installed.requires or []
        for name in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
            link = site_packages / name
            if not link.exists():  # several may share a package, and a fresh environment has pip
                link.symlink_to(installed.locate_file(name))


def test_a_wheel_from_the_source_distribution_works_in_an_empty_environment(tmp_path):
    copy, dist, environment = tmp_path / "copy", tmp_path / "dist", tmp_path / "environment"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    run(sys.executable, "-m", "build", "--outdir", dist, copy, cwd=tmp_path)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        top = sdist.name.removesuffix(".tar.gz")
        assert sources() <= {name.removeprefix(f"{top}/") for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == sources()

    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    link_requirements(wheel, environment)
    python, distman = environment / "bin" / "python", environment / "bin" / "distman"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel, cwd=tmp_path)
    assert "No broken requirements found." in run(python, "-m", "pip", "check", cwd=tmp_path)
    missing = run(python, "-c", IMPORT_ALL, cwd=tmp_path)
    assert set(missing.splitlines()) == {"testing pytest"}, "only the test kit needs more than is installed"
    assert "rank 0 of 1" in run(python, "-c", ONE_PROCESS, cwd=tmp_path)
    assert run(distman, "env", cwd=tmp_path).startswith("launcher          single\n")
    assert "One process" in run(python, "-m", "distman", "check", cwd=tmp_path)
