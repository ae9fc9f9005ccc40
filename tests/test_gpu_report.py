import re
from pathlib import Path

import torch

from . import gpu_report

TESTS = Path(__file__).parent


def test_without_a_gpu_it_says_so_and_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_report.main(["--output", str(tmp_path / "report.md")]) == 2
    assert "There is no GPU here: torch sees none. Unset CUDA_VISIBLE_DEVICES, or run" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_the_report_has_every_part_and_how_it_ended(tmp_path, monkeypatch, capsys):
    ends = {
        "sound": ["-c", "print('| a | table |')"],
        "broken": ["-c", "raise SystemExit(3)"],
        "endless": ["-c", "import signal; print('began', flush=True); signal.pause()"],
    }
    parts = [
        gpu_report.Part(title, command, 1 if title == "endless" else 60, is_markdown=True)
        for title, command in ends.items()
    ]
    monkeypatch.setattr(gpu_report, "parts", lambda *_: parts)
    assert gpu_report.main(["--on-cpu", "--output", str(tmp_path / "report.md")]) == 1
    text = (tmp_path / "report.md").read_text()
    for line in (
        "| sound | went well |",
        "| broken | FAILED with exit code 3 |",
        "| endless | FAILED: not done after 1 s |",
        "\n\n| a | table |\n",
        "```text\nbegan\n```",
        f"| torch | {torch.__version__} |",
    ):
        assert line in text
    assert "broken ... FAILED with exit code 3" in capsys.readouterr().out


def test_the_parts_take_less_than_10_minutes():
    assert sum(part.limit for part in gpu_report.parts(8, 30)) < 10 * 60


def test_what_is_not_there_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_report, "NEEDED", ("torch", "not_there"))
    assert gpu_report.main(["--output", str(tmp_path / "report.md")]) == 2
    assert "must have not_there, got none. Install it, or use another Python." in capsys.readouterr().err


def test_every_test_that_needs_a_gpu_is_in_the_report():
    marks = re.compile(r"^@pytest\.mark\.gpu$", re.MULTILINE)
    marked = {path for path in TESTS.rglob("test_*.py") if marks.search(path.read_text(encoding="utf-8"))}
    assert {gpu_report.REPOSITORY / name for name in gpu_report.TESTS} == marked - {TESTS / "test_no_skips.py"}
