# ruff: noqa: ARG001, ARG005 - a function that is called on a device need not look at it
import dataclasses
import functools
import os
import signal
import threading
import time
from collections import namedtuple
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

import numpy as np
import pytest
import torch

from distman.executor import ParallelExecutor

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Report:
    loss: torch.Tensor
    name: str


def test_results_come_in_the_order_of_the_devices_from_processes_of_their_own(pair):
    first = pair.run(lambda device: os.getpid())
    assert first == pair.run(lambda device: os.getpid())
    assert len({*first, os.getpid()}) == 3


@pytest.mark.parametrize(
    ("function", "arguments", "keywords"),
    [
        (lambda device, x, y: (device.type, x, y), (1,), {"y": 2}),
        (lambda d, x, y: (d.type, x, y), (1, 2), {}),
        (lambda x, y, device: (device.type, x, y), (1, 2), {}),
        (lambda x, y, device="cuda": (device.type, x, y), (1,), {"y": 2}),
        (lambda x, *, y, device: (device.type, x, y), (1,), {"y": 2}),
        (lambda device, /, x, y: (device.type, x, y), (1, 2), {}),
        (lambda *all_, **names: (all_[0].type, *all_[1:], *names.values()), (1,), {"y": 2}),
        (lambda **names: (names["device"].type, names["x"], names["y"]), (), {"x": 1, "y": 2}),
        (lambda *, x, **names: (names["device"].type, x, names["y"]), (), {"x": 1, "y": 2}),
        (lambda d, **names: (d.type, *names.values()), (), {"x": 1, "y": 2}),
        (lambda *device, x, y: (device[0].type, x, y), (), {"x": 1, "y": 2}),
        (functools.partial(lambda x, y, device: (device.type, x, y), 1), (2,), {}),
    ],
)
def test_the_device_is_the_first_argument_or_goes_by_its_name(pair, function, arguments, keywords):
    assert pair.run(function, *arguments, **keywords) == [("cpu", 1, 2)] * 2


def test_a_device_that_the_executor_would_replace_is_refused(pair):
    for call in (pair.run, lambda *args, **kwargs: pair.submit(*args, **kwargs).result()):
        with pytest.raises(TypeError, match="device must be left to the executor, got 'cuda'"):
            call(lambda x, device: x, 1, device="cuda")
        with pytest.raises(TypeError, match="multiple values for argument 'device'"):
            call(lambda device: 1, device="cuda")


def initialize(device, text):
    os.environ["TEST_DISTMAN_INITIALIZED"] = f"{text} on {device}"


def test_every_worker_is_initialized_once_also_one_that_takes_the_place_of_another():
    def look(device):
        return os.environ.pop("TEST_DISTMAN_INITIALIZED", None), os.getpid()

    with ParallelExecutor(devices=["cpu", "cpu"], initializer=initialize, initargs=["set"]) as executor:
        (first, pid), (second, _) = executor.run(look)
        assert (first, second) == ("set on cpu", "set on cpu")
        assert [found for found, _ in executor.run(look)] == [None, None]
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            pass
        assert [found for found, _ in executor.run(look)] == ["set on cpu", None]


def test_a_worker_whose_initializer_fails_does_not_start(tmp_path):
    def initialize_by(folder):
        what = (folder / "what").read_text()
        if what == "raise":
            raise ZeroDivisionError("no")
        if what == "exit":
            os._exit(4)
        if what == "hang":
            time.sleep(100)

    messages = {
        "raise": "did not start: its initializer failed: ZeroDivisionError: no",
        "exit": "did not start: its initializer failed: WorkerDiedError: .* died with exit code 4",
        "hang": "did not start: its initializer failed: .* did not answer within 1 s",
    }
    with ParallelExecutor(
        devices=["cpu"], pass_device=False, initializer=initialize_by, initargs=[tmp_path], timeout=1
    ) as executor:
        for what, message in messages.items():
            (tmp_path / "what").write_text(what)
            for call in (executor.run, lambda function: executor.submit(function).result()):
                with pytest.raises(BrokenExecutor, match=f"(?s){message}"):
                    call(os.getpid)
        (tmp_path / "what").write_text("nothing")
        assert executor.run(abs, -3) == [3]


def test_an_initializer_that_is_no_function_is_refused_as_elsewhere():
    for kind in (ParallelExecutor, ThreadPoolExecutor):
        with pytest.raises(TypeError, match="initializer must be a"):
            kind(initializer=3)


def double(x):
    return 2 * x


def test_it_answers_as_the_executor_of_the_standard_library_does():
    def use(executor):
        yield (
            list(executor.map(double, [1, 2, 3])),
            list(executor.map(double, [])),
            list(executor.map(pow, [2, 3], [3])),
        )
        yield executor.submit(double, 2).result(), executor.submit(double, x="a").exception()
        failed = executor.submit(int, "no").exception()
        yield type(failed), failed.args, type(executor.submit(double).exception()), type(executor.submit(3).exception())
        numbers = executor.map(int, ["1", "no", "3"])
        yield next(numbers), _kind_of_error(next, numbers), _kind_of_error(next, numbers)
        yield _kind_of_error(lambda: executor.map(abs, 3))
        yield _kind_of_error(lambda: next(executor.map(time.sleep, [0.5, 0], timeout=0.05)))
        busy = [executor.submit(time.sleep, 0.1) for _ in range(4)]
        yield [future.cancel() for future in busy[::-1]][:1], wait(busy, 20).not_done
        yield {future.result() for future in as_completed([executor.submit(double, 2) for _ in range(3)])}
        late = [executor.submit(double, n) for n in range(3)]
        executor.shutdown(wait=True)
        yield [future.result() for future in late], [future.done() for future in late]
        yield _kind_of_error(lambda: executor.submit(double, 1)), _kind_of_error(lambda: executor.map(double, [1]))
        executor.shutdown()

    ours = ParallelExecutor(devices=["cpu"], pass_device=False)
    with ThreadPoolExecutor(1) as reference:
        for found, expected in zip(use(ours), use(reference), strict=True):
            assert repr(found) == repr(expected)


def _kind_of_error(call, *args):
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - it is compared
        return type(error)


def test_an_error_within_with_lets_what_was_submitted_be_done():
    def fail_after_submitting():
        futures.extend(executor.submit(double, n) for n in range(20))
        raise ValueError("of the program")

    for executor in (ParallelExecutor(devices=["cpu"], pass_device=False), ThreadPoolExecutor(1)):
        futures = []
        with pytest.raises(ValueError, match="of the program"), executor:
            fail_after_submitting()
        assert [future.result(0) for future in futures] == [2 * n for n in range(20)]


def test_a_function_without_a_signature_takes_its_device_first(pair):
    assert pair.run(type) == [torch.device] * 2


def test_map_and_submit_share_the_work_out(pair):
    assert list(pair.map(lambda device, x, y: x * y, range(20), range(20))) == [x * x for x in range(20)]
    futures = [pair.submit(lambda device: (time.sleep(0.2), os.getpid())[1]) for _ in range(2)]
    assert len({future.result(20) for future in as_completed(futures, 20)}) == 2


def test_a_module_of_a_class_of_its_own_is_sent_by_name(pair):
    cudnn = torch.backends.cudnn
    assert pair.run(lambda device: cudnn is torch.backends.cudnn) == [True, True]


def test_run_from_several_threads_and_submit_take_turns(pair):
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(pair.run(lambda device, n: n, n))) for n in range(6)]
    for thread in threads:
        thread.start()
    futures = [pair.submit(lambda device, n: n, n) for n in range(6)]
    for thread in threads:
        thread.join(20)
    assert sorted(results) == [[n, n] for n in range(6)]
    assert [future.result(20) for future in futures] == list(range(6))


def test_large_tensors_and_texts_arrive_whole(pair):
    for result in pair.run(lambda device: torch.arange(50 * 1024**2, dtype=torch.int32)):
        assert result.nbytes == 200 * 1024**2
        assert torch.equal(result[:: 1024**2], torch.arange(0, 50 * 1024**2, 1024**2, dtype=torch.int32))
        assert result[-1] == 50 * 1024**2 - 1
    assert pair.submit(lambda device: "x" * 3_000_000).result() == "x" * 3_000_000


def test_results_outlive_the_workers_each_of_which_has_its_own_random_numbers():
    def draw(device):
        return torch.rand(1).item(), float(np.random.rand())

    torch.manual_seed(5)
    with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
        drawn = executor.run(draw)
        (large, small) = executor.run(lambda device: (torch.ones(1024, 1024), torch.ones(3)))[0]
        array = executor.run(lambda device: np.arange(100_000))[0]
    assert large.sum() == 1024**2
    assert small.sum() == 3
    assert array[-1] == 99_999
    large += 1
    array += 1
    expected = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (5, 6)]
    assert drawn == [(one, np.random.RandomState(seed).rand()) for one, seed in zip(expected, (5, 6), strict=True)]


def test_results_stay_as_they_are_when_others_follow(pair):
    kept = [pair.run(lambda device, n: torch.full((100_000,), n), n) for n in range(6)]
    views = [results[0][5:10] for results in kept[::2]]
    del kept[::2]
    later = [pair.run(lambda device, n: torch.full((100_000,), n), n) for n in range(10, 16)]
    assert [results[1].unique().tolist() for results in kept] == [[1], [3], [5]]
    assert [view.unique().tolist() for view in views] == [[0], [2], [4]]
    assert [results[0].unique().tolist() for results in later] == [[n] for n in range(10, 16)]


def test_arguments_are_each_workers_own(pair):
    given = torch.zeros(100_000)
    array = np.zeros(100_000)

    def change(device, tensor, array):
        tensor += 1
        array += 1
        return float(tensor.sum()), float(array.sum())

    assert pair.run(change, given, array) == [(100_000.0, 100_000.0)] * 2
    assert given.sum() == array.sum() == 0


@pytest.mark.parametrize("size", [4, 100_000])
def test_tensors_keep_what_they_are(pair, size):
    def make(device, size):
        base = torch.arange(size, dtype=torch.float64)
        return {
            "strided": base.view(2, -1).t(),
            "view": base[1:3],
            "base": base,
            "complex": torch.complex(base, base).conj(),
            "half": base.to(torch.bfloat16),
            "bool": base > 1,
            "float8": (base > 1).to(torch.float8_e4m3fn),
            "empty": torch.empty(0, 3),
            "sparse": torch.eye(3).to_sparse(),
            "scalar": torch.tensor(3),
        }

    expected = make("cpu", size)
    for result in pair.run(make, size):
        assert {name: tensor.dtype for name, tensor in result.items()} == {
            name: tensor.dtype for name, tensor in expected.items()
        }
        assert result.pop("float8").float().sum() == size - 2
        assert all(
            torch.equal(tensor.to_dense(), expected[name].to_dense())
            if tensor.is_sparse
            else torch.equal(tensor, expected[name])
            for name, tensor in result.items()
        )
        assert result["strided"].stride() == expected["strided"].stride()
        result["base"][1] = -5
        assert result["view"][0] == -5


def test_results_are_detached(pair):
    def train(device):
        weight = torch.ones(3, requires_grad=True)
        return Report((weight * 2).sum(), "loss"), Pair(weight, 1)

    for report, weights in pair.run(train):
        assert type(report).__name__ == "Report"
        assert type(weights).__name__ == "Pair"
        assert float(report.loss.numpy()) == 6
        assert not weights.left.requires_grad


@dataclasses.dataclass
class Leaf:
    parent: list
    loss: torch.Tensor | None = None


def test_what_holds_itself_comes_back(pair):
    def make(device, needs_grad):
        tree = []
        tree += [Leaf(tree), Leaf(tree, torch.ones(1, requires_grad=needs_grad))]
        return tree

    for needs_grad in (False, True):
        for tree in pair.run(make, needs_grad):
            assert [leaf.parent is tree for leaf in tree] == [True, True]
            assert not tree[1].loss.requires_grad


def test_a_model_travels_both_ways(pair):
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))

    def step(device, model):
        model = model.to(device)
        model(torch.ones(4, 300)).sum().backward()
        return model

    for result in pair.run(step, model):
        assert torch.equal(result[0].weight, model[0].weight)
        assert result[1].num_batches_tracked == 1
    assert model[0].weight.grad is None


def test_an_executor_travels_as_one_of_its_own_and_can_be_nested(pair):
    def outer(device, inner):
        with inner:
            return os.getpid(), inner.run(lambda device, x: (os.getpid(), torch.full((100_000,), x)), 3)

    pid, results = pair.submit(outer, ParallelExecutor(devices=["cpu", "cpu"], timeout=60)).result()
    assert len({os.getpid(), pid, *(inner for inner, _ in results)}) == 4
    assert [tensor.sum() for _, tensor in results] == [300_000, 300_000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": []}, r"devices must be a list with at least one device, got \[\]"),
        ({"devices": "cpu"}, "devices must be a list with at least one device, got 'cpu'"),
        ({"devices": ["cpu"], "num_gpus": 1}, "devices must stand alone, got num_gpus=1"),
        ({"num_gpus": 0}, "num_gpus must be a number from 1 to the"),
        ({"num_gpus": 1000}, "num_gpus must be a number from 1 to the"),
        ({"num_gpus": True}, "num_gpus must be a number from 1 to the"),
        ({"timeout": 0}, "timeout must be a positive number of seconds below 2,000,000, got 0"),
        ({"timeout": float("nan")}, "timeout must be a positive number of seconds .*, got nan"),
        ({"timeout": float("inf")}, "timeout must be a positive number of seconds .*, got inf from the call"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParallelExecutor(**arguments)
