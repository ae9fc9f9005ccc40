"""Slurm asks every process of a step to stop, the workers of loaders too."""

import sys
from pathlib import Path

import pytest

PREEMPTED = Path(__file__).parent / "scripts" / "preempted.py"
LIMIT = 120
EX_TEMPFAIL = 75


@pytest.mark.parametrize(("kind", "number"), [("handler", "TERM"), ("plain", "USR2"), ("spawned", "USR1")])
def test_a_training_with_workers_saves_when_slurm_signals_all_of_them(slurm_cluster, tmp_path, kind, number):
    """Not with preloaded interpreters: Slurm signals those below its own."""
    with slurm_cluster.start_srun("-N2", "-n2", sys.executable, PREEMPTED, kind, tmp_path) as job:
        job.wait_for_output("training", times=2, timeout=LIMIT)
        slurm_cluster.scancel(f"--signal={number}", "--user=root")
        finished = job.wait(timeout=LIMIT)
    assert finished.returncode == EX_TEMPFAIL
    assert (tmp_path / "latest.pt").exists()
    assert "DataLoader worker" not in finished.stderr
