"""A copy of the manager is the manager: however it is made, it is a view of the one state that there is where it is."""

import copy
import functools
import io
import multiprocessing
import pickle

import cloudpickle
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from distman import DistributedManager, NotInitializedError, ParallelExecutor
from distman.handler import NNHandler
from distman.testing import ranks

from .views import Layer, ask


def saved_by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value, protocol):
    return pickle.loads(pickle.dumps(value, protocol))  # noqa: S301 - our own


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": saved_by_torch,
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
    **{
        f"pickle {protocol}": functools.partial(pickled, protocol=protocol)  # the one of text, of C, and of frames
        for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)
    },
}


def check_views(**views):
    """Check that views follow the state, by how they were made: they go with the job, and see the next one."""
    manager = DistributedManager()
    for how, view in views.items():
        assert type(view) is DistributedManager, how
        assert (view.rank, view.world_size, view.group_size()) == (manager.rank, manager.world_size, manager.world_size)
        view.find_unused_parameters = not manager.find_unused_parameters
        assert view.find_unused_parameters == manager.find_unused_parameters
    DistributedManager.cleanup()
    for how, view in views.items():
        with pytest.raises(NotInitializedError):
            pytest.fail(f"{how} has rank {view.rank}")
    DistributedManager.initialize(device="cpu")
    assert {how: view.device for how, view in views.items()} == dict.fromkeys(views, torch.device("cpu"))


@ranks(1, 2)
def test_a_copy_is_a_view_of_the_same_state():
    check_views(**{how: make(DistributedManager()) for how, make in COPIES.items()})


@ranks(1, 2)
def test_a_copy_of_a_model_that_keeps_the_manager_is_whole():
    layers = {how: make(Layer()) for how, make in COPIES.items()}
    for how, layer in layers.items():
        layer(torch.ones(3, 2)).sum().backward()
        assert layer.place["manager"].rank == layer.manager.rank, how
        assert layer.size_of() == DistributedManager().world_size
    check_views(**{how: layer.manager for how, layer in layers.items()})


def test_a_copy_of_a_subclass_is_of_that_class():
    DistributedManager.initialize(device="cpu")
    for how, make in COPIES.items():
        assert type(make(Own(argument=3))) is Own, how


class Own(DistributedManager):
    """A manager that is made with an argument."""

    def __init__(self, argument=None):
        super().__init__()
        self.given = argument


def test_a_saved_model_names_public_modules_only():
    """Private ones may move, and the file must be read then, too."""
    DistributedManager.initialize(device="cpu")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert b"distman._" not in pickle.dumps(DistributedManager(), protocol)


@ranks(2)
def test_an_average_of_a_model_that_keeps_the_manager():
    model = DistributedManager().wrap_ddp(Layer())
    average = AveragedModel(model)
    average.update_parameters(model)
    check_views(average=average.module.module.manager)


@ranks(2)
def test_the_handler_averages_a_model_that_keeps_the_manager(rank):
    handler = NNHandler(Layer, device="cpu")
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(torch.nn.MSELoss())
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    handler.set_train_loader(data, batch_size=2)
    handler.train(epochs=1, ema_decay=0.9)
    assert handler.module.manager.rank == rank


@ranks(2)
def test_a_view_in_a_new_process_asks_the_manager_there(rank):
    if rank != 0:  # the other one is there for the job to have two
        return
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=ask, args=(DistributedManager(), answers))
    process.start()
    assert answers.get(timeout=60) == (0, 1)
    process.join()


def test_a_view_in_a_worker_of_an_executor_asks_the_manager_there():
    DistributedManager.initialize(device="cpu")
    layer = Layer()

    def ask_twice():
        is_there = DistributedManager.is_initialized()
        DistributedManager.initialize(device="cpu", use_distributed=False)
        return is_there, layer.manager.world_size, layer.manager.barrier()

    with ParallelExecutor(devices=["cpu"], pass_device=False) as executor:
        assert executor.run(ask_twice) == [(False, 1, None)]
    assert DistributedManager().rank == 0
