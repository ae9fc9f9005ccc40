import os
import signal
import sys
from pathlib import Path

import pytest

from .processes import marked, poll, start

REPOSITORY = Path(__file__).parents[2]

HANGING_TEST = """
from pathlib import Path

def test_that_hangs(slurm_cluster, namespace_hosts):
    with slurm_cluster.start_srun("-N2", "sh", "-c", "echo up; sleep 60") as running:
        running.wait_for_output("up", times=2)
        own = [slurm_cluster.directory, slurm_cluster.hosts.directory, namespace_hosts.directory]
        (Path(__file__).parent / "folders").write_text(" ".join(str(folder) for folder in own))
        running.wait(timeout=60)
"""

BROKEN_CLUSTER = """
from pathlib import Path

from tests.launch.slurm import SlurmCluster

def test_broken(monkeypatch, slurm_cluster, tmp_path):
    monkeypatch.setattr(SlurmCluster, "_all_nodes_idle", lambda self: 1 / 0)
    broken = SlurmCluster(num_nodes=1)
    try:
        broken.__enter__()
    finally:
        (Path(__file__).parent / "folders").write_text(f"{broken.directory} {broken.hosts.directory}")
"""


def start_pytest(folder, text, *more):
    (folder / "test_generated.py").write_text(text)
    options = [
        "-p",
        "tests.conftest",
        "-p",
        "tests.launch.conftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:distman",
        "-s",
        "-c",
        REPOSITORY / "pyproject.toml",
        *more,
    ]
    return start([sys.executable, "-m", "pytest", *options, folder / "test_generated.py"], cwd=REPOSITORY)


def folders(folder):
    """Return what the test says that it made, nothing before it does."""
    said = folder / "folders"
    return [Path(word) for word in said.read_text().split()] if said.exists() else []


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["-n", "1"])],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM with a process for the tests"],
)
@pytest.mark.usefixtures("slurm_cluster")
def test_interrupted_session_leaves_nothing(number, options, tmp_path):
    with start_pytest(tmp_path, HANGING_TEST, *options) as running:
        assert poll(lambda: len(folders(tmp_path)) == 3, 30.0)
        assert all(folder.exists() for folder in folders(tmp_path))
        assert len(marked(running.marker)) > 10
        os.kill(running.pid, number)
        finished = running.wait(timeout=20)
        assert finished.returncode == pytest.ExitCode.INTERRUPTED
        assert not marked(running.marker)
        assert not any(folder.exists() for folder in folders(tmp_path))


@pytest.mark.usefixtures("slurm_cluster")
def test_cluster_that_comes_up_half_way_is_taken_down(tmp_path):
    with start_pytest(tmp_path, BROKEN_CLUSTER) as running:
        finished = running.wait(timeout=20)
        assert finished.returncode == pytest.ExitCode.TESTS_FAILED
        assert "ZeroDivisionError" in finished.stdout
        assert not marked(running.marker)
        assert not any(folder.exists() for folder in folders(tmp_path))
