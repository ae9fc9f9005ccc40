"""What a newcomer passes by mistake is answered with what was wrong, what was given, and what to do."""

import re

import pytest
import torch

import distman
from distman import DistributedManager, NotInitializedError, checkpoint, collectives, metrics
from distman.data import distributed_loader
from distman.executor import ParallelExecutor
from distman.handler import NNHandler
from distman.testing import ranks

ONES = torch.ones(3)
SAMPLES = torch.utils.data.TensorDataset(torch.ones(10, 2))


def handler():
    return NNHandler(torch.nn.Linear, in_features=2, out_features=1)


WRONG = {
    "a launcher that is a number": (lambda: distman.explain(method=3), TypeError),
    "a timeout as text": (lambda: DistributedManager().barrier(timeout="5m"), TypeError),
    "a negative timeout": (lambda: DistributedManager().barrier(timeout=-1), ValueError),
    "a group that is a number": (lambda: DistributedManager().group_size(3), TypeError),
    "a tree that is text": (lambda: DistributedManager.create_groups_from_config("world(a=1)"), TypeError),
    "a tree whose root is text": (lambda: distman.ProcessGroupConfig("world"), TypeError),
    "a part of a tree that is text": (
        lambda: distman.ProcessGroupConfig(distman.ProcessGroupNode("world")).add_node("model", "world"),
        TypeError,
    ),
    "a mesh of the wrong size": (lambda: DistributedManager().initialize_mesh((2, 2), ("a", "b")), ValueError),
    "a mesh with text for a length": (lambda: DistributedManager().initialize_mesh(("1",), ("a",)), ValueError),
    "a length as text": (lambda: distman.split_sizes("10", 2), TypeError),
    "a length with a fraction": (lambda: distman.split_sizes(10.0, 2), TypeError),
    "a list for a tensor": (lambda: collectives.all_gather_v([1, 2]), TypeError),
    "a number for sizes": (lambda: collectives.all_gather_v(ONES, sizes=3), ValueError),
    "text for sizes": (lambda: collectives.all_gather_v(ONES, sizes="3"), ValueError),
    "a dim that is none": (lambda: collectives.all_gather_v(ONES, dim=2), ValueError),
    "a rank as text": (lambda: collectives.scatter_v(ONES, [3], src="0"), ValueError),
    "a negative rank": (lambda: collectives.gather_v(ONES, dst=-1), ValueError),
    "an operation that is none": (lambda: collectives.fused_all_reduce([ONES], op="mean"), ValueError),
    "a module that is text": (lambda: distman.mappings.mark_module_as_shared("model"), TypeError),
    "a loss as text": (lambda: metrics.reduce_loss("x"), TypeError),
    "metrics that are no mapping": (lambda: metrics.aggregate_metrics([1.0]), TypeError),
    "a metric as text": (lambda: metrics.aggregate_metrics({"loss": "x"}), TypeError),
    "a weight as text": (lambda: metrics.aggregate_metrics({"loss": 1.0}, weight="x"), TypeError),
    "a decorator without its rank": (lambda: distman.on_local_rank(print), TypeError),
    "a path that is a number": (lambda: checkpoint.load(3), TypeError),
    "state and path swapped": (lambda: checkpoint.save("state.pt", {"a": 1}), TypeError),
    "a batch size as text": (lambda: distributed_loader(SAMPLES, batch_size="2"), TypeError),
    "a batch size of none": (lambda: distributed_loader(SAMPLES, batch_size=0), ValueError),
    "no list of devices": (lambda: ParallelExecutor(devices=2), ValueError),
    "no function for the ranks": (lambda: distman.run("train.py", n=2), TypeError),
    "no number of ranks": (lambda: distman.run(print, n="two"), ValueError),
    "a model for its class": (lambda: NNHandler(torch.nn.Linear(2, 1)), TypeError),
    "no loss function": (lambda: handler().set_loss_fn("mse"), TypeError),
    "a callback that is none": (lambda: handler().add_callback(print), TypeError),
    "an equation that is none": (lambda: handler().set_sde(3), TypeError),
    "the path of data": (lambda: handler().set_train_loader("data/train"), TypeError),
    "a number for data": (lambda: handler().set_val_loader(3), TypeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_is_answered_with_its_name_its_value_and_what_to_do(name):
    call, error = WRONG[name]
    DistributedManager.initialize()
    try:
        with pytest.raises(error) as caught:
            call()
    finally:
        DistributedManager.cleanup()
    assert re.fullmatch(r"[\w' .]+ must .+, got .+\. [A-Z].+\.", str(caught.value), re.DOTALL)


def test_a_launcher_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"^method must be the name of a launcher, got 3 from the call\. "):
        DistributedManager.initialize(method=3)


def test_a_manager_that_is_asked_too_early_says_what_to_call():
    with pytest.raises(NotInitializedError, match=r"Call DistributedManager\.initialize\(\) once"):
        DistributedManager()


def test_a_checkpoint_that_is_a_directory_is_told(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a directory and no checkpoint\. Name a file in it"):
        checkpoint.load(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"must not be a directory, got .*\. Name a file in it"):
        checkpoint.save({"a": 1}, tmp_path)


@ranks(2)
def test_what_is_wrong_is_told_on_several_ranks_before_anything_is_sent():
    for name in ("a list for a tensor", "a rank as text", "a group that is a number", "an operation that is none"):
        call, error = WRONG[name]
        with pytest.raises(error, match=r"must .*, got "):
            call()
    assert collectives.all_gather_v(ONES).shape == (6,)
