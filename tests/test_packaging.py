"""What users install: the two distributions, the wheel in an environment that holds nothing else, and a clone.

What it requires is linked into that environment, not installed: to unpack torch takes a minute.
"""

import re
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

from .test_types import EXPECTED, mypy

ROOT = Path(__file__).parents[1]
LIMIT = 400
LARGEST = 900_000  # bytes of the wheel: 2 MB of code, compressed; data or pictures among it would exceed that
IN_REPOSITORY = {
    *(".ci", "distman", "docs", "launchers", "tests"),
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md", "pyproject.toml", "setup.cfg"),
}
GENERATED = re.compile(r"PKG-INFO|distman_torch\.egg-info/.*")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "_build", "*.egg-info", "__pycache__", ".*_cache"
)
WITHOUT_TORCH = """
import importlib.util
import distman

assert importlib.util.find_spec("torch") is None
assert distman.environments.detect({}) is not None
"""
WITH_TORCH = """
import importlib, pkgutil
import distman

for module in pkgutil.walk_packages(distman.__path__, "distman."):
    if module.name != "distman.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name.split(".")[1], error.name)
print(distman.DistributedManager.initialize())
"""


def run(*command, cwd):
    """Run a program to its end and return what it printed."""
    __tracebackhide__ = True
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        pytest.fail(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def files(folder):
    """The files in a folder and below, as names from there."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in paths}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository, called as a clone is, beside which nothing lies."""
    copy = tmp_path_factory.mktemp("projects") / "distman"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    return copy


@pytest.fixture(scope="module")
def distributions(clone, tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, clone, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def new_environment(folder):
    """A virtual environment without any package."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "environment", cwd=folder)
    return folder / "environment"


@pytest.fixture(scope="module")
def environment(distributions, tmp_path_factory):
    """A virtual environment that holds the wheel, and at first nothing else."""
    environment = new_environment(tmp_path_factory.mktemp("installed"))
    pip(environment, "install", "--quiet", "--no-index", "--no-deps", distributions[1])
    run(environment / "bin" / "python", "-c", WITHOUT_TORCH, cwd=environment)
    assert run(environment / "bin" / "distman", "--version", cwd=environment).startswith("distman ")
    link(about(distributions[1]).get_all("Requires-Dist"), environment)
    return environment


def site_packages(environment):
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


def pip(environment, *arguments):
    python = environment / "bin" / "python"
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=environment)


def about(wheel):
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def link(requirements, environment):
    """Let an environment hold what is required, and what that requires: what this one holds of it."""
    wanted = [*requirements]
    seen = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in seen or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        installed = metadata.distribution(requirement.name)
        wanted += installed.requires or []
        for name in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
            place = site_packages(environment) / name
            if not place.exists():  # several may share a package
                place.symlink_to(installed.locate_file(name))


def test_the_source_distribution_is_the_repository(clone, distributions):
    sdist, _ = distributions
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    expected = {name for name in files(clone) if name.partition("/")[0] in IN_REPOSITORY}
    assert {name for name in members if not GENERATED.fullmatch(name)} == expected
    assert {name.partition("/")[0] for name in expected} == IN_REPOSITORY


def test_the_wheel_is_the_package_and_no_more(clone, distributions):
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    (page,) = (name for name in names if name.endswith("/data/share/man/man1/distman.1"))
    assert names == {page, *(f"distman/{name}" for name in files(clone / "distman"))}
    assert "distman/py.typed" in names
    assert wheel.stat().st_size < LARGEST


def test_the_metadata_say_what_the_wheel_is(distributions):
    _, wheel = distributions
    said = about(wheel)
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert said.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    lowest, *_ = re.findall(r":: (3\.\d+)$", "\n".join(said.get_all("Classifier")), re.MULTILINE)
    assert said["Requires-Python"] == f">={lowest}"


def test_the_wheel_works_in_an_environment_that_holds_what_it_requires(environment, tmp_path):
    python, distman = environment / "bin" / "python", environment / "bin" / "distman"
    assert "No broken requirements found." in pip(environment, "check")
    *missing, last = run(python, "-c", WITH_TORCH, cwd=tmp_path).splitlines()
    assert set(missing) == {"testing pytest"}, "only the test kit needs more than is installed"
    assert "rank 0 of 1" in last
    assert run(distman, "env", cwd=tmp_path).startswith("launcher          single\n")


def test_a_type_checker_finds_the_types_of_the_wheel(environment, tmp_path, pytestconfig):
    """One will do: that the other reads them, too, `test_types` shows."""
    found, said = mypy(environment / "bin" / "python", tmp_path, pytestconfig.cache.mkdir("mypy"))
    assert found == EXPECTED, said


def test_a_script_beside_an_editable_clone_finds_the_package_and_not_the_folder(clone, tmp_path):
    environment = new_environment(tmp_path)
    link(["setuptools"], environment)
    pip(environment, "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--editable", clone)
    script = clone.parent / "script.py"
    script.write_text("import distman; print(distman.__file__)")
    found = run(environment / "bin" / "python", script, cwd=clone.parent)
    assert found == f"{clone / 'distman' / '__init__.py'}\n"
