import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from distman.executor import as_cpu

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    tensor: torch.Tensor
    name: str = "frozen"


@dataclasses.dataclass
class OtherArguments:
    tensor: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.tensor = torch.ones(1, requires_grad=True)


class Marked(list):
    pass


def tensors(obj):
    if isinstance(obj, torch.Tensor):
        yield obj
    elif dataclasses.is_dataclass(obj):
        yield from tensors([getattr(obj, field.name) for field in dataclasses.fields(obj)])
    elif isinstance(obj, dict):
        yield from tensors(list(obj.values()))
    elif isinstance(obj, list | tuple | set):
        for value in obj:
            yield from tensors(value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor,
        lambda tensor: [tensor, 1],
        lambda tensor: (tensor, "a"),
        lambda tensor: Point(tensor, 2),
        lambda tensor: {tensor},
        lambda tensor: {"a": [{"b": tensor}]},
        lambda tensor: OrderedDict(a=tensor),
        lambda tensor: defaultdict(list, a=[tensor]),
        lambda tensor: Frozen(tensor),
        lambda _: OtherArguments(),
        lambda tensor: Marked([tensor]),
        lambda tensor: torch.return_types.max((tensor, tensor)),
    ],
)
def test_containers_keep_their_type(wrap):
    given = wrap(torch.ones(1, requires_grad=True))
    moved = as_cpu(given)
    assert type(moved) is type(given)
    assert [tensor.requires_grad for tensor in tensors(moved)] == [False] * len(list(tensors(moved)))
    assert list(tensors(moved)) != []
    assert all(tensor.requires_grad for tensor in tensors(given))


def test_tensors_elsewhere_are_moved():
    with pytest.raises(NotImplementedError, match="meta"):
        as_cpu({"a": torch.ones(1, device="meta")})


def test_what_needs_nothing_stays_the_same_object():
    given = {"a": [torch.ones(1), Frozen(torch.ones(2))], "b": (1, "x"), "c": Frozen, "d": {1}}
    assert as_cpu(given) is given
