import torch

from . import gpu_report


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


def test_the_parts_take_less_than_15_minutes():
    assert sum(part.limit for part in gpu_report.parts(8, 30)) < 15 * 60
