"""What a start asks of the job's store grows with the number of ranks as the page on benchmarks says."""

import random
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from distman._job.meeting.membership import _Verdict
from distman._job.meeting.peers import complete

from .join_records import join_record

BENCHMARKS = Path(__file__).parents[3] / "docs" / "benchmarks"
RANKS_PER_HOST = 8
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


def page():
    """The table's rows by number of ranks: verdict per rank and in all, gloo's addresses per rank and in all."""
    rows = re.findall(r"^\| ([\d,]+) \| (\d.*B) \| .* \|$", (BENCHMARKS / "scale.md").read_text(), re.MULTILINE)
    assert [ranks for ranks, _ in rows] == ["1,000", "10,000", "100,000"]
    return {int(ranks.replace(",", "")): [in_bytes(cell) for cell in cells.split(" | ")] for ranks, cells in rows}


def in_bytes(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def verdict(num_ranks):
    draw = random.Random(num_ranks)  # noqa: S311 - no secret
    boot_ids = [str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(num_ranks)]
    records = [
        join_record(
            rank,
            num_ranks,
            host=f"node{rank // RANKS_PER_HOST:05}",
            boot_id=boot_ids[rank // RANKS_PER_HOST],
            pid=draw.randrange(1 << 22),
        )
        for rank in range(num_ranks)
    ]
    return len(_Verdict(complete(records)).pack())


@pytest.mark.parametrize("num_ranks", [1_000, 10_000])
def test_every_rank_reads_the_verdict(num_ranks):
    per_rank, in_all, *_ = page()[num_ranks]
    assert per_rank == pytest.approx(verdict(num_ranks), rel=0.1)
    assert in_all == pytest.approx(num_ranks * per_rank, rel=0.1)


def test_every_rank_reads_where_gloo_reaches_the_others():
    few, many = 4, 12
    command = [sys.executable, BENCHMARKS / "scale.py", str(few), str(many), "--rounds", "1", "--ways", "distman"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    received = [float(row.split()[-1]) for row in output.splitlines()[1:]]
    per_other_rank = (received[1] - received[0] - (verdict(many) - verdict(few))) / (many - few)
    for num_ranks, (_, _, per_rank, in_all) in page().items():
        assert per_rank == pytest.approx(num_ranks * per_other_rank, rel=0.1)
        assert in_all == pytest.approx(num_ranks * per_rank, rel=0.1)
