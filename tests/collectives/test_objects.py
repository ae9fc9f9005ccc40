import dataclasses
import math
import sys
from random import Random
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distman import DistributedManager, RankFailedError
from distman.collectives import all_gather_objects, broadcast_data, broadcast_if_ddp, gather_objects
from distman.testing import ranks

LARGE = 40_000


@dataclasses.dataclass
class Configuration:
    name: str
    weights: torch.Tensor


@dataclasses.dataclass
class Spoiled:
    """Pickled well, but not to be loaded."""

    def __reduce__(self):
        return int, ("no number",)


class Measured:
    """Looks at its tensor while it is loaded."""

    def __init__(self):
        self.weights = torch.full((LARGE,), 3.0)

    def __setstate__(self, state):
        self.mean = state["weights"].mean().item()


class Passing:
    """Hands the pickler tensors that nobody else holds."""

    def __reduce__(self):
        return list, (), None, (torch.full((LARGE,), float(number)) for number in range(6))


def data():
    big = torch.arange(LARGE, dtype=torch.float64)
    return {
        "big": big,
        "again": big,
        "strided": torch.arange(2 * LARGE).view(2, -1).t(),
        "complex": torch.ones(LARGE, dtype=torch.complex64) * 1j,
        "bool": torch.ones(2 * LARGE, dtype=torch.bool),
        "half": torch.ones(LARGE, dtype=torch.bfloat16),
        "small": torch.tensor([1, 2]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "grad": torch.ones(LARGE, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(LARGE)),
        "numpy": np.arange(3),
        "nested": [(Configuration("a", torch.ones(LARGE)), None)],
    }


def assert_equal(found, expected):
    for key in ("big", "strided", "complex", "bool", "half", "small", "empty", "scalar", "grad", "parameter"):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key])
        assert found[key].requires_grad == expected[key].requires_grad
    assert found["big"] is found["again"]
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert found["grad"].is_leaf
    assert found["numpy"].tolist() == [0, 1, 2]
    assert found["nested"][0][0].name == "a"
    assert torch.equal(found["nested"][0][0].weights, torch.ones(LARGE))


@ranks(1, 3)
def test_broadcast_to_receivers_that_know_nothing(rank, world_size):
    src = world_size - 1
    other = [None, {"big": torch.ones(1, dtype=torch.int8)}, "text"][rank % 3]
    assert_equal(broadcast_data(data() if rank == src else other, src), data())


@ranks(2)
def test_the_source_keeps_its_object(rank):
    mine = [torch.ones(LARGE)]
    assert (broadcast_data(mine, src=rank * 0) is mine) == (rank == 0)


@ranks(2)
def test_plain_objects(rank):
    for plain in (None, 0, "text", b"", (), {"a": [1]}):
        assert broadcast_data(plain if rank == 0 else object()) == plain


@ranks(2)
def test_functions_travel(rank):
    factor = 3
    assert broadcast_data((lambda x: x * factor) if rank == 0 else None)(2) == 6


@ranks(4)
def test_groups_without_rank_0(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    assert broadcast_data(rank, 1, "pairs") == rank // 2 * 2 + 1
    assert all_gather_objects(rank, "pairs") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert gather_objects(rank, 1, "pairs") == ([rank - 1, rank] if rank % 2 else None)


@ranks(1, 2, 3)
def test_gather_and_all_gather(rank, world_size):
    mine = {"rank": rank, "tensor": torch.full((rank * LARGE,), rank), "text": "x" * rank}
    for found in (all_gather_objects(mine), gather_objects(mine, world_size - 1)):
        if found is None:
            assert rank != world_size - 1
            continue
        assert [one["rank"] for one in found] == list(range(world_size))
        assert all(torch.equal(one["tensor"], torch.full((n * LARGE,), n)) for n, one in enumerate(found))
        assert found[rank] is mine


def broadcast(obj, rank):
    return broadcast_data(obj if rank == 0 else None)


def gather(obj, rank):
    return gather_objects(obj if rank == 0 else None, dst=1)


def all_gather(obj, rank):
    return all_gather_objects(obj if rank == 0 else None)


# What `python train.py` runs on every rank, with a lock that no pickle takes.
SCRIPT = """
import dataclasses, enum, threading

lock = threading.Lock()
Mode = enum.Enum("Mode", ["FAST", "EXACT"])

@dataclasses.dataclass
class Split:
    files: list

    def mine(self):
        return self.files[rank::2]

class Counter:
    class Inner:
        pass

    def is_locked(self):
        return lock.locked()

def doubled(value):
    return (2 * value, rank)
"""


def run_as_script(monkeypatch, text, rank):
    script = ModuleType("__main__")
    script.rank = rank
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(text, vars(script))  # noqa: S102 - as the interpreter does
    return script


@ranks(2)
def test_what_the_script_defines_arrives_as_the_receivers_own(monkeypatch, rank):
    script = run_as_script(monkeypatch, SCRIPT, rank)
    made = [script.Mode.FAST, script.Split([0, 1, 2, 3]), script.Counter(), script.Counter.Inner, script.doubled]
    for found in (broadcast_data(made if rank == 0 else None), *all_gather_objects(made)):
        mode, split, counter, inner, doubled = found
        assert mode is script.Mode.FAST
        assert split == script.Split([0, 1, 2, 3])
        assert split.mine() == [rank, rank + 2]
        assert type(counter) is script.Counter
        assert not counter.is_locked()
        assert inner is script.Counter.Inner
        assert doubled(3) == (6, rank)
    triple = eval("lambda value: (3 * value, Mode.FAST)", vars(script))  # noqa: S307 - as above
    assert broadcast_data(triple if rank == 0 else None)(2) == (6, script.Mode.FAST)


@pytest.mark.parametrize("share", [broadcast, gather, all_gather])
@ranks(3)
def test_what_the_script_of_another_rank_lacks_is_copied(monkeypatch, rank, share):
    script = run_as_script(monkeypatch, SCRIPT if rank == 0 else "", rank)
    made = [script.Split([0, 1, 2, 3]), script.doubled, torch.ones(LARGE)] if rank == 0 else None
    found = share(made, rank)
    if found is not None:
        split, doubled, large = found if share is broadcast else found[0]
        assert split.mine() == [0, 2]
        assert doubled(3) == (6, 0)
        assert large.sum() == LARGE
    with pytest.raises((TypeError, RankFailedError), match=r"cannot pickle '_thread.lock' object"):
        share(script.Counter() if rank == 0 else None, rank)
    assert broadcast_data(rank) == 0


@pytest.mark.parametrize("share", [broadcast, gather, all_gather])
@ranks(3)
def test_what_cannot_be_pickled_is_one_error_on_all(rank, share):
    with pytest.raises((TypeError, RankFailedError), match="cannot pickle 'generator' object") as caught:
        share((number for number in (1, 2)), rank)
    assert isinstance(caught.value, RankFailedError) == (rank != 0)
    assert broadcast_data(rank) == 0


@pytest.mark.parametrize("share", [broadcast, gather, all_gather])
@ranks(3)
def test_what_cannot_be_loaded_is_one_error_on_all(rank, share):
    with pytest.raises((ValueError, RankFailedError), match="invalid literal for int"):
        share(Spoiled(), rank)
    assert broadcast_data(rank) == 0


@ranks(2)
def test_wrong_ranks():
    with pytest.raises(ValueError, match="src must be a rank in group 'world', 0 to 1, got 2"):
        broadcast_data(1, 2)
    with pytest.raises(ValueError, match="dst must be a rank"):
        gather_objects(1, -1)


def test_broadcast_if_ddp_without_a_job():
    assert broadcast_if_ddp("mine") == "mine"


@ranks(2)
def test_broadcast_if_ddp_in_a_job(rank):
    assert broadcast_if_ddp(rank, 1) == 1


@ranks(2)
def test_an_object_may_use_its_tensors_while_it_is_loaded(rank):
    found = broadcast_data(Measured() if rank == 0 else None)
    assert rank == 0 or found.mean == 3


@ranks(2)
def test_tensors_that_live_only_while_they_are_pickled(rank):
    found = broadcast_data(Passing() if rank == 0 else None)
    assert rank == 0 or [one.unique().item() for one in found] == [0, 1, 2, 3, 4, 5]


@ranks(2)
def test_conjugated_tensors(rank):
    complex_numbers = torch.full((LARGE,), 1 + 2j).conj()
    found = broadcast_data({"conjugated": complex_numbers} if rank == 0 else None)
    assert torch.equal(found["conjugated"], complex_numbers)


class Tagged(torch.Tensor):
    pass


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]
LAYOUTS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(1, 3),
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last),
    "every other": lambda tensor: tensor[..., ::2],
    "part": lambda tensor: tensor[1:],
    "expanded": lambda tensor: tensor[:1].expand(5, -1, -1, -1),
    "scalar": lambda tensor: tensor.flatten()[0],
    "empty": lambda tensor: tensor[:0],
    "without dims": lambda tensor: tensor.new_empty(0),
}


def draw_tensor(random):
    """A tensor of any type and layout, smaller or larger than what is pickled."""
    shape = [random.choice([2, 3, 4]), 3, random.choice([1, 8, 64]), random.choice([1, 16, 128])]
    dtype = random.choice(DTYPES)
    num_bytes = math.prod(shape) * dtype.itemsize
    values = torch.frombuffer(bytearray(random.randbytes(num_bytes)), dtype=torch.uint8) & 1
    tensor = LAYOUTS[random.choice(list(LAYOUTS))](values.view(dtype).view(shape))
    if dtype.is_complex and random.random() < 0.5:
        tensor = tensor.conj()
    kind = random.choice([torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, Tagged])
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
    elif kind is torch.nn.Buffer:
        tensor = torch.nn.Buffer(tensor)
    elif kind is Tagged:
        tensor = tensor.as_subclass(Tagged)
    if kind is torch.Tensor and dtype.is_floating_point and random.random() < 0.5:
        tensor.requires_grad_()
    if random.random() < 0.5:
        tensor.note = f"drawn {random.random()}"
    return tensor


def features(tensor):
    plain = tensor.detach().as_subclass(torch.Tensor)
    return {
        "type": type(tensor),
        "layout": (plain.dtype, plain.shape, plain.stride(), plain.storage_offset(), plain.is_conj()),
        "grad": (tensor.requires_grad, tensor.is_leaf),
        "attributes": vars(tensor),
        "buffer": isinstance(tensor, torch.nn.Buffer),
        "bytes": plain.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist(),
    }


@ranks(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_tensors_of_any_type_layout_and_size_stay_what_they_are(rank, seed, default):
    drawn = [draw_tensor(Random(f"{seed} {number}")) for number in range(60)]  # noqa: S311 - no secrets
    expected = [features(tensor) for tensor in drawn]
    with torch.device(default):
        found = broadcast_data(drawn if rank == 0 else None)
        gathered = all_gather_objects(drawn)[1 - rank]
    assert [features(tensor) for tensor in found] == expected
    assert [features(tensor) for tensor in gathered] == expected


@pytest.mark.parametrize("size", [4, LARGE])
@ranks(2)
def test_views_of_one_tensor_stay_views_of_one_tensor(rank, size):
    base = torch.zeros(size)
    found, view, again = broadcast_data((base, base[1:3], base) if rank == 0 else None)
    found[2] = 7
    assert view.tolist() == [0, 7]
    assert again is found


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about how it loads quantized tensors
@pytest.mark.parametrize("size", [4, LARGE])
@ranks(2)
def test_other_kinds_of_tensors(rank, size):
    given = {
        "sparse": torch.eye(4).repeat(1, size // 4).to_sparse(),
        "csr": torch.eye(4).repeat(1, size // 4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.arange(float(size)), 1.0, 0, torch.qint8),
        "meta": torch.empty(size, device="meta"),
        "storage": torch.ones(size).untyped_storage(),
    }
    found = broadcast_data(given if rank == 0 else None)
    assert found["sparse"].is_sparse
    assert torch.equal(found["sparse"].to_dense(), given["sparse"].to_dense())
    assert found["csr"].layout == torch.sparse_csr
    assert torch.equal(found["csr"].to_dense(), given["csr"].to_dense())
    assert torch.equal(found["quantized"].int_repr(), given["quantized"].int_repr())
    assert (found["meta"].device.type, found["meta"].shape) == ("meta", (size,))
    assert bytes(found["storage"]) == bytes(given["storage"])


@pytest.mark.parametrize("share", [broadcast, gather, all_gather])
@ranks(2)
def test_a_tensor_of_which_each_rank_has_a_part_is_one_error_on_all(rank, share):
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises((TypeError, RankFailedError), match=r"got a DTensor, .*\. Pass what its to_local\(\)"):
        share([distribute_tensor(torch.ones(4), mesh, [Shard(0)])], rank)
    assert broadcast_data(rank) == 0


@ranks(2)
def test_modules_and_states_of_optimizers(rank):
    torch.manual_seed(rank)
    module = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    found, state = broadcast_data((module, optimizer.state_dict()) if rank == 0 else None)
    sums = all_gather_objects((found.weight.sum().item(), state["state"][0]["exp_avg"].sum().item()))
    assert sums[0] == sums[1]
