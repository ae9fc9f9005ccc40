"""``distman.run``: a function as a job."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch

import distman

from ...launch import preloaded
from ...notebooks import outputs_of_cells


def place(first, *, step=1):
    manager = distman.DistributedManager.initialize()
    print(f"rank {manager.rank}")  # noqa: T201 - what is shown is tested
    return first + step * manager.rank


@pytest.mark.usefixtures("preloaded_ranks")
def test_what_the_function_returns_comes_back_in_the_order_of_ranks():
    assert distman.run(place, 10, n=3, step=2) == [10, 12, 14]


@pytest.mark.usefixtures("preloaded_ranks")
def test_what_it_prints_is_shown_where_the_program_prints():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        distman.run(place, 0, n=2)
    assert sorted(output.getvalue().splitlines()) == ["0: rank 0", "1: rank 1"]


@pytest.mark.usefixtures("preloaded_ranks")
def test_lambdas_closures_and_tensors_travel():
    offset = torch.arange(3)
    results = distman.run(lambda: offset + int(os.environ["RANK"]), n=2)
    assert [result.tolist() for result in results] == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.usefixtures("preloaded_ranks")
def test_an_error_is_that_of_the_rank_that_failed():
    def fail():
        manager = distman.DistributedManager.initialize()
        if manager.rank == 1:
            raise ValueError("sample 17 has no label")
        manager.barrier()

    with pytest.raises(distman.RankFailedError, match=r"rank 1 .* raised ValueError: sample 17 has no label") as caught:
        distman.run(fail, n=3)
    assert caught.value.rank == 1


def test_an_error_of_a_function_that_starts_no_job_is_told_too():
    def fail():
        assert os.environ["RANK"] != "0", "not here"

    with pytest.raises(distman.RankFailedError, match=r"rank 0 .* raised AssertionError: not here") as caught:
        distman.run(fail, n=2)
    shown = [line for line in str(caught.value).splitlines() if " File " in line]
    assert len(shown) == 1, "the way to the function is left out"
    assert __file__ in shown[0]


def test_a_death_names_rank_and_host():
    with pytest.raises(distman.RankFailedError, match=rf"rank 0 \({socket.gethostname()}, pid \d+\) was killed"):
        distman.run(lambda: os.kill(os.getpid(), signal.SIGKILL), n=1)


def test_what_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(distman.RankFailedError, match="cannot pickle"):
        distman.run(lambda: sys._getframe(), n=1)


def test_what_cannot_be_sent_is_an_error_here():
    with pytest.raises(TypeError, match="cannot pickle"):
        distman.run(print, sys._getframe(), n=2)


@pytest.mark.parametrize("number", [0, -2, "all", 1.5])
def test_a_number_of_ranks_that_is_none_is_refused(number):
    with pytest.raises(ValueError, match="n must be a number of at least 1, gpu, cpu or auto, got "):
        distman.run(print, n=number)


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGKILL, "the process that started the ranks was ended by SIGKILL, and they with it"),
        (signal.SIGTERM, "the job was ended by SIGTERM"),
    ],
)
def test_a_job_that_is_ended_from_outside_is_told(number, end):
    def end_the_starter():
        os.kill(os.getppid(), number)
        signal.pause()

    with pytest.raises(distman.DistmanError, match=end):
        distman.run(end_the_starter, n=2)


def test_a_program_that_ends_instead_of_returning_is_named():
    with pytest.raises(distman.DistmanError, match=r"^rank 1 ended with exit code 0 before the function returned"):
        distman.run(lambda: sys.exit(0) if os.environ["RANK"] == "1" else None, n=2)


def test_nothing_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    distman.run(lambda: subprocess.Popen(["sleep", "1000"]).pid, n=2)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


CALLER = """
import os, signal, sys
import distman
{handler}
def wait():
    print(os.getpid(), flush=True)
    signal.pause()
distman.run(wait, n=2)
"""


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGINT, ""),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))"),
    ],
)
def test_the_ranks_end_with_the_program_that_called(number, handler, tmp_path):
    (tmp_path / "caller.py").write_text(CALLER.format(handler=handler))
    with subprocess.Popen([sys.executable, "caller.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as caller:
        ranks = [psutil.Process(int(caller.stdout.readline()[3:])) for _ in range(2)]
        caller.send_signal(number)
        _, alive = psutil.wait_procs([*ranks, caller], timeout=60)
        for process in alive:
            process.kill()
    assert alive == []


@pytest.mark.usefixtures("preloaded_ranks")
def test_a_notebook_has_results_output_and_errors_in_its_cells(tmp_path):
    cells = [
        f"import sys\nimport distman\nfactor = 3\nsys.executable = {str(preloaded.PYTHON)!r}",
        """
        def work():
            manager = distman.DistributedManager.initialize()
            print("rank", manager.rank, flush=True)
            return factor * manager.rank
        """,
        "distman.run(work, n=2)",
        "factor = 5\ndistman.run(lambda: factor, n=1)",
        """
        try:
            distman.run(lambda: 1 / 0, n=2)
        except distman.RankFailedError as error:
            print(error.error_type)
        """,
        """
        import torch
        from distman.handler import NNHandler
        handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        handler.set_optimizer(torch.optim.SGD, lr=0.1)
        handler.set_loss_fn(torch.nn.functional.mse_loss)
        handler.set_train_loader(torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), batch_size=2)
        handler.train(2);
        """,
    ]
    outputs = outputs_of_cells([textwrap.dedent(cell) for cell in cells], tmp_path)
    assert [one["data"]["text/plain"] for one in outputs if one["output_type"] == "execute_result"] == ["[0, 3]", "[5]"]
    written = "".join(one["text"] for one in outputs if one.get("name") == "stdout").splitlines()
    assert sorted(written[:2]) == ["0: rank 0", "1: rank 1"]
    assert written[2:] == ["ZeroDivisionError"]
    bars = "".join(one["text"] for one in outputs if one.get("name") == "stderr")
    assert "epoch 2/2" in bars
