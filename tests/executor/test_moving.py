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
    given["itself"] = [given]
    assert as_cpu(given) is given


@dataclasses.dataclass(eq=False)
class Node:
    weight: torch.Tensor
    around: object = None


CYCLES = {
    "a list": lambda node: [node],
    "a tuple": lambda node: (node, 1),
    "a named tuple": lambda node: Point(node, node),
    "a dictionary": lambda node: {"node": node},
    "a set": lambda node: {node},
    "a frozen set in a tuple": lambda node: (frozenset([node]),),
    "itself": lambda node: node,
}


def node_in(obj):
    """Return the first node that is in it."""
    while not isinstance(obj, Node):
        obj = next(iter(obj.values() if isinstance(obj, dict) else obj))
    return obj


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("begins_at_the_node", [False, True])
def test_what_holds_itself_is_copied_with_what_it_holds(name, begins_at_the_node):
    given = Node(torch.ones(1, requires_grad=True))
    given.around = CYCLES[name](given)
    moved = as_cpu(given) if begins_at_the_node else as_cpu([given.around])[0]
    node = moved if begins_at_the_node else node_in(moved)
    assert node is not given
    assert type(node.around) is type(given.around)
    assert not node.weight.requires_grad
    assert given.weight.requires_grad
    assert node_in(node.around) is node
    assert begins_at_the_node or node.around is moved


def test_what_is_shared_is_copied_once_and_what_needs_nothing_stays_in_it():
    kept = [torch.ones(1)]
    given = [torch.ones(1, requires_grad=True), kept]
    for _ in range(60):
        given = [given, given, kept]
    moved = as_cpu(given)
    for _ in range(60):
        assert moved[0] is moved[1]
        assert moved[2] is kept
        moved = moved[0]
    assert not moved[0].requires_grad
    assert moved[1] is kept
