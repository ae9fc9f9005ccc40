"""What ``distman bench`` is made of, and what it refuses; ``tests/launch/test_check.py`` lets it measure."""

import argparse
import sys

import pytest

from distman import DistributedManager
from distman._cli import bench, main
from distman._cli.bench import NAMES
from distman._cli.output import parse_size, show_bandwidth, show_seconds, show_size
from distman._cli.timing import largest, measure
from distman.testing import ranks


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8", 8), ("64k", 65536), ("4 MiB", 4 << 20), ("1G", 1 << 30), ("2KB", 2048)]
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "k", "-8", "1.5k", "8T", "0", "8 bits"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a size must be a whole number of bytes, k, M or G, got "):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (0.0000123, "12.3 us"), (-0.0035, "-3.5 ms"), (3, "3 s"), (59.94, "59.9 s"), (86_400, "86400 s")],
)
def test_times_are_shown(seconds, text):
    assert show_seconds(seconds) == text


def test_sizes_and_bandwidths_are_shown():
    assert [show_size(size) for size in (1, 1023, 1024, 1536, 3 << 30)] == [
        "1 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "3 GiB",
    ]
    assert [show_bandwidth(rate) for rate in (1500, 2.5e6, 1.234e12)] == ["1.5 kB/s", "2.5 MB/s", "1230 GB/s"]


FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1,
    "p2p": lambda _: 1,
    "reduce_scatter": lambda n: (n - 1) / n,
}


@ranks(2, 3)
@pytest.mark.parametrize("operation", NAMES)
def test_an_operation_is_measured_by_the_definitions_of_nccl_tests(operation, world_size):
    manager = DistributedManager()
    result = measure(operation, 1000, manager, num_rounds=3)
    assert (result.operation, result.num_rounds) == (operation, 3)
    assert 1000 <= result.num_bytes < 1000 + 4 * world_size
    assert result.algorithm_bandwidth == pytest.approx(result.num_bytes / result.seconds)
    assert result.bus_bandwidth == pytest.approx(result.algorithm_bandwidth * FACTORS[operation](world_size))
    assert largest(result.seconds, manager) == result.seconds  # the same on all ranks


def test_sizes_that_become_equal_are_measured_once():
    assert bench.cases_of(["all_gather", "p2p"], [8, 16, 32, 64], 8) == [
        *[("all_gather", size) for size in (32, 64)],
        *[("p2p", size) for size in (8, 16, 32, 64)],
    ]


@ranks(3)
def test_the_largest_number_is_everyones(rank):
    assert largest(rank / 3, DistributedManager()) == 2 / 3


@ranks(1, manager=False)
def test_one_rank_is_refused(monkeypatch):
    words = Words()
    monkeypatch.setattr(sys, "stderr", words)
    assert main(["bench"]) == 1
    assert words.text.startswith("distman bench: one rank has nobody to talk to. ")
    assert words.text.count("\n") == 1


class Words:
    """What is written, in place of a stream."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min-size", "8", "--max-size", "4"], "--max-size must be at least --min-size, got 4 and 8 bytes. "),
        (["--min-size", "x"], "argument "),
        (["--factor", "1"], "argument "),
        (["--rounds", "0"], "argument "),
        (["--rounds", "\N{SUPERSCRIPT TWO}"], "argument "),
        (["--operations", "gather"], "argument "),
    ],
)
def test_options_without_a_meaning_are_refused_at_once(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert f"distman bench: error: {said}" in capsys.readouterr().err
