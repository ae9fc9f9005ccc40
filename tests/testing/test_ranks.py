import enum
import os
import random
import signal
import warnings
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.distributed as dist

from distman.testing import kill_rank, ranks

SCALE = 3


class Colour(enum.Enum):
    RED = 1


@dataclass
class Box:
    value: int

    def doubled(self):
        return helper(self.value)


def helper(value):
    return 2 * value


def total(value):
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.fixture
def box():
    return Box(4)


@pytest.fixture
def variable(monkeypatch):
    monkeypatch.setenv("TEST_DISTMAN_VARIABLE", "set in the pytest process")


@ranks(1, 2, 4)
def test_runs_on_every_rank_of_every_world_size(rank, world_size):
    assert dist.get_rank() == rank
    assert dist.get_world_size() == world_size
    assert total(rank) == sum(range(world_size))


@ranks(2)
def test_rank_and_world_size_are_not_needed():
    assert total(1) == 2


@ranks(2)
def test_globals_of_the_module_travel(box):
    assert isinstance(box, Box)
    assert box.doubled() == helper(4) == 8
    assert Colour["RED"] is Colour.RED
    assert SCALE == 3


@ranks(2)
@pytest.mark.parametrize("colour", list(Colour))
@pytest.mark.parametrize("number", [1, 2])
def test_parametrized_arguments_travel(number, colour, world_size):
    assert colour is Colour.RED
    assert total(number) == number * world_size


@pytest.mark.parametrize("make", [lambda: 5])
@ranks(2)
def test_decorators_in_the_other_order_and_a_lambda(make):
    assert make() == 5


@ranks(2)
def test_a_folder_is_shared(tmp_path, rank):
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@ranks(2)
@pytest.mark.parametrize("cache", [False, {"keys": [1, 2]}])
def test_a_parameter_may_be_called_as_a_fixture_of_pytest_is(cache):
    assert cache in (False, {"keys": [1, 2]})


class TestInClass:
    limit = 7

    @pytest.fixture
    def recwarn(self):
        return Box(5)

    @ranks(2)
    def test_a_fixture_of_ones_own_may_be_called_as_one_of_pytest_is(self, recwarn):
        assert recwarn.doubled() == 10

    def setup_method(self):
        self.made = [1, 2]

    @ranks(2)
    def test_method(self, rank, box):
        assert self.limit == 7
        assert self.made[rank] == rank + 1
        assert self.double(box.value) == 8

    def double(self, value):
        return helper(value)


@ranks(2)
def test_pytest_raises_and_warns(rank):
    with pytest.raises(ValueError, match=f"by rank {rank}"):
        raise ValueError(f"by rank {rank}")
    with pytest.warns(UserWarning, match="look out"):
        warnings.warn("look out", stacklevel=1)


@ranks(2)
def test_warnings_are_errors_as_configured():
    with pytest.raises(UserWarning, match="an error here"):
        warnings.warn("an error here", stacklevel=1)


@ranks(2)
@pytest.mark.filterwarnings("ignore:not worth a word")
def test_the_filters_of_a_mark_count_too():
    warnings.warn("not worth a word", stacklevel=1)


@ranks(2)
def test_environment_is_that_of_a_launcher(rank, world_size):
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == str(world_size)
    assert not [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_"))]


@pytest.mark.usefixtures("variable")
@ranks(2)
def test_variables_of_fixtures_travel():
    assert os.environ["TEST_DISTMAN_VARIABLE"] == "set in the pytest process"


@ranks(2)
def test_monkeypatch_is_each_ranks_own(monkeypatch, rank):
    monkeypatch.setenv("TEST_DISTMAN_VARIABLE", str(rank))
    monkeypatch.setattr(os, "sep", "here")
    assert os.environ["TEST_DISTMAN_VARIABLE"] == str(rank)
    assert os.sep == "here"


@ranks(2)
def test_monkeypatch_was_undone():
    assert os.sep == "/"
    assert "TEST_DISTMAN_VARIABLE" not in os.environ


def draws():
    return [random.random(), torch.rand(()).item(), numpy.random.random()]  # noqa: S311 - no secret


@ranks(2)
def test_generators_differ_between_ranks():
    both = [None, None]
    dist.all_gather_object(both, draws())
    assert not set(both[0]) & set(both[1])


@ranks(2)
def test_runs_on_the_cpu_with_one_thread():
    assert not torch.cuda.is_available()
    assert torch.get_num_threads() == 1
    assert dist.get_backend() == "gloo"


@ranks(3, dies=[1])
def test_a_death_can_be_expected(rank):
    kill_rank(1)
    assert rank != 1


@ranks(2, 3, dies=[0])
def test_survivors_see_the_death():
    kill_rank(0, signal=signal.SIGTERM)
    with pytest.raises(RuntimeError):
        dist.barrier()


@ranks(3, dies=[2])
def test_leaving_the_interpreter_is_a_death(rank):
    if rank == 2:
        os._exit(0)


@ranks(2)
def test_a_copy_that_the_test_forks_does_not_answer():
    pid = os.fork()
    if pid == 0:
        raise ValueError("in the copy")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert total(1) == 2
