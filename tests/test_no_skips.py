import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_runs():
    pass

def test_skips_itself():
    pytest.skip("reason of the call")

@pytest.mark.skip(reason="reason of the mark")
def test_marked():
    pass

@pytest.mark.skipif(True, reason="reason of the condition")
def test_conditional():
    pass

@pytest.fixture
def missing():
    pytest.skip("reason of the fixture")

def test_with_fixture(missing):
    pass

@pytest.mark.parametrize("value", [])
def test_without_values(value):
    pass

@pytest.mark.xfail(run=False, reason="reason not to run")
def test_not_run():
    pass

def test_gives_up():
    pytest.xfail("reason to give up")

@pytest.mark.xfail(reason="known to fail")
def test_known_to_fail():
    assert False

@pytest.mark.gpu
def test_on_gpu():
    pytest.skip("no GPU")
"""
MODULES = {
    "test_module_skip.py": "import pytest\npytest.skip('the whole module', allow_module_level=True)\n",
    "test_import.py": "import pytest\npytest.importorskip('no_such_module_anywhere')\n",
}

ALONE_AND_UNDER_XDIST = pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "under xdist"])


@pytest.fixture
def generated(tmp_path):
    """A folder with the tests above and the conftest of this one."""
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return tmp_path


def outcomes(folder, *options, forbid):
    """Return what the closing line of pytest says, as a dictionary, and the whole output."""
    environ = {**os.environ, "DISTMAN_FORBID_SKIP": "1" if forbid else "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:distman", "-ra", *options]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=60)
    closing_line = done.stdout.splitlines()[-1]
    return {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", closing_line)}, done.stdout


@ALONE_AND_UNDER_XDIST
def test_skips_are_failures_where_forbidden(generated, options):
    (generated / "test_generated.py").write_text(TESTS)
    counts, output = outcomes(generated, *options, forbid=True)
    assert counts == {"passed": 1, "failed": 2, "errors": 5, "skipped": 1, "xfailed": 1}
    for reason in (
        "of the call",
        "of the mark",
        "of the condition",
        "of the fixture",
        "not to run",
        "to give up",
    ):
        assert f"reason {reason}" in output


@ALONE_AND_UNDER_XDIST
def test_skipped_modules_are_errors_where_forbidden(generated, options):
    for name, text in MODULES.items():
        (generated / name).write_text(text)
    counts, output = outcomes(generated, *options, forbid=True)
    assert counts["errors"] == len(MODULES)
    assert "the whole module" in output
    assert "no_such_module_anywhere" in output


def test_skips_are_skips_otherwise(generated):
    (generated / "test_generated.py").write_text(TESTS)
    for name, text in MODULES.items():
        (generated / name).write_text(text)
    counts, _ = outcomes(generated, forbid=False)
    assert counts == {"passed": 1, "skipped": 8, "xfailed": 3}
