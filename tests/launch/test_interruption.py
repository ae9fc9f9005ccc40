import os
import signal
import sys
from pathlib import Path

import pytest

from .processes import marked, start

REPOSITORY = Path(__file__).parents[2]

HANGING_TEST = """
def test_that_hangs(slurm_cluster, namespace_hosts):
    with slurm_cluster.start_srun("-N2", "sh", "-c", "echo up; sleep 60") as running:
        running.wait_for_output("up", times=2)
        own = [slurm_cluster.directory, slurm_cluster.hosts.directory, namespace_hosts.directory]
        print("folders", *own, flush=True)
        running.wait(timeout=60)
"""

BROKEN_CLUSTER = """
from tests.launch.slurm import SlurmCluster

def test_broken(monkeypatch, slurm_cluster, tmp_path):
    monkeypatch.setattr(SlurmCluster, "_all_nodes_idle", lambda self: 1 / 0)
    broken = SlurmCluster(num_nodes=1)
    try:
        broken.__enter__()
    finally:
        print("folders", broken.directory, broken.hosts.directory, flush=True)
"""


def start_pytest(folder, text):
    (folder / "test_generated.py").write_text(text)
    options = [
        "-p",
        "tests.launch.conftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:distman",
        "-s",
        "-c",
        REPOSITORY / "pyproject.toml",
    ]
    return start([sys.executable, "-m", "pytest", *options, folder / "test_generated.py"], cwd=REPOSITORY)


def folders(running):
    (line,) = (line for line in running.stdout.splitlines() if "folders" in line)
    return [Path(word) for word in line.split("folders")[1].split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("slurm_cluster")
def test_interrupted_session_leaves_nothing(number, tmp_path):
    with start_pytest(tmp_path, HANGING_TEST) as running:
        running.wait_for_output("folders")
        assert all(folder.exists() for folder in folders(running))
        assert len(marked(running.marker)) > 10
        os.kill(running.pid, number)
        finished = running.wait(timeout=20)
        assert finished.returncode == pytest.ExitCode.INTERRUPTED
        assert not marked(running.marker)
        assert not any(folder.exists() for folder in folders(running))


@pytest.mark.usefixtures("slurm_cluster")
def test_cluster_that_comes_up_half_way_is_taken_down(tmp_path):
    with start_pytest(tmp_path, BROKEN_CLUSTER) as running:
        finished = running.wait(timeout=20)
        assert finished.returncode == pytest.ExitCode.TESTS_FAILED
        assert "ZeroDivisionError" in finished.stdout
        assert not marked(running.marker)
        assert not any(folder.exists() for folder in folders(running))
