"""What the README's table says about this package: for each cell the tests that show it."""

import ast
import re

import pytest

from .test_package import README, REPOSITORY

SHOWN_BY = {
    "GPUs and NCCL": ("not yet run", ["tests/test_gpu_report.py::test_without_a_gpu_it_says_so_and_what_to_do"]),
    "FSDP, DeepSpeed, TPUs": (
        "FSDP2, tried on gloo alone",
        ["tests/job/manager/test_fsdp.py::test_gradients_are_those_of_one_process"],
    ),
    "experiment trackers": (
        "TensorBoard, MLflow, W&B, lines of JSON",
        ["tests/handler/test_tracking.py::test_rank_zero_writes_all_numbers_in_order"],
    ),
    "layers on sharded inputs": (
        "[convolutions, pooling, norms](docs/howto/domain.md), AFNO",
        [
            "tests/domain/test_layers.py::test_one_split_dim",
            "tests/fft/test_afno.py::test_output_and_gradients_equal_one_process_where_the_channels_are_split",
        ],
    ),
    "starts the processes": (
        "`distman run`, on one machine",
        ["tests/cli/run/test_run.py::test_every_rank_runs_the_script_with_its_arguments"],
    ),
    "reads the launchers": (
        "[ten](docs/launchers.md)",
        ["tests/environments/test_recorded.py::test_every_recording_has_a_row_and_every_row_a_recording"],
    ),
    "a rank missing at the start": (
        "named",
        ["tests/launch/test_failures.py::test_a_missing_rank_is_named_by_those_that_came"],
    ),
    "an exception on one rank": (
        "raised on all, with its traceback",
        ["tests/launch/test_failures.py::test_without_a_launcher_that_ends_it"],
    ),
    "evaluation of uneven data": (
        "each sample once",
        ["tests/data/test_batches.py::test_evaluation_reads_each_sample_once_in_rank_order"],
    ),
    "`kill -9` while a checkpoint is replaced": (
        "kept",
        ["tests/checkpoint/test_ends.py::test_what_was_saved_survives_a_kill_at_any_moment"],
    ),
    "gathers uneven shards, with gradients": (
        "on gloo; NCCL not tried",
        ["tests/collectives/test_all_gather.py::test_gradcheck"],
    ),
    "Fourier transform along a sharded dim": (
        "n-D, any shards, stays sharded",
        ["tests/fft/test_transforms.py::test_result_and_gradient_equal_one_process_in_every_layout"],
    ),
}


def rows():
    """The rows of the table as lists of cells, without the header."""
    table = re.search(r"^\| \[evidence\].*\n\|[- |]+\|\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table[1].splitlines()]


def test_each_cell_about_this_package_is_listed_with_what_shows_it():
    assert {row[0]: row[-1] for row in rows()} == {label: cell for label, (cell, _) in SHOWN_BY.items()}


@pytest.mark.parametrize("test", [test for _, tests in SHOWN_BY.values() for test in tests])
def test_what_shows_a_cell_is_there(test):
    path, _, name = test.partition("::")
    tree = ast.parse((REPOSITORY / path).read_text())
    assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


def test_every_cell_is_shown_by_a_test():
    assert [label for label, (_, tests) in SHOWN_BY.items() if not tests] == []
