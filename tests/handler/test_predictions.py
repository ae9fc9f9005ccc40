"""One entry for each sample, in order, on any number of ranks, whatever a model returns."""

import collections
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from distman import DistributedManager
from distman.handler import NNHandler
from distman.testing import ranks

Pair = collections.namedtuple("Pair", ["first", "second"])


def size_of(number):
    return number * 7 % 5


def boxes_of(number):
    size = size_of(number)
    return {"boxes": torch.full((size, 4), float(number)), "label": f"sample {number}", "size": size}


KINDS = {
    "numbers": lambda numbers: torch.tensor(numbers),
    "rows": lambda numbers: torch.tensor(numbers)[:, None] * torch.ones(3),
    "boxes": lambda numbers: [boxes_of(one) for one in numbers],
    "ragged list": lambda numbers: [torch.full((size_of(one), 2), float(one)) for one in numbers],
    "ragged tuple": lambda numbers: tuple(torch.full((size_of(one),), float(one)) for one in numbers),
    "nested": lambda numbers: torch.nested.nested_tensor(
        [torch.full((size_of(one), 2), float(one)) for one in numbers], layout=torch.jagged
    ),
    "padded": lambda numbers: torch.stack([torch.full((max(map(size_of, numbers)),), float(one)) for one in numbers]),
    "strings": lambda numbers: [f"sample {one}" for one in numbers],
    "lists": lambda numbers: [[one] * size_of(one) for one in numbers],
    "arrays": lambda numbers: np.array(numbers),
    "nothing": lambda _: None,
}


def entries(kind, number, width):
    """What the one entry of a sample must be."""
    if kind == "padded":
        return torch.full((width,), float(number))
    value = KINDS[kind]([number])
    return value.unbind()[0] if kind == "nested" else value if value is None else value[0]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return one == other


class Model(nn.Module):
    """Returns outputs of some kinds, in a structure."""

    def __init__(self, kinds, wrap):
        super().__init__()
        self.weight, self.kinds, self.wrap = nn.Parameter(torch.ones(())), kinds, wrap

    def forward(self, inputs):
        return self.wrap([KINDS[kind](inputs.int().tolist()) for kind in self.kinds])


STRUCTURES = {
    "tuple": tuple,
    "dict": lambda parts: {f"part {index}": part for index, part in enumerate(parts)},
    "pair": lambda parts: Pair(parts[0], {"rest": tuple(parts[1:])}),
}


def parts_in(found, structure):
    if structure == "pair":
        return [found.first, *found.second["rest"]]
    return [*(found.values() if structure == "dict" else found)]


@ranks(1, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_returns_one_kind_of_outputs(kind):
    handler = NNHandler(Model, kinds=[kind], wrap=lambda parts: parts[0])
    found = handler.predict(torch.arange(11.0), batch_size=4, all_ranks=True)
    if kind == "nothing":
        assert found is None
        return
    assert len(found) == 11
    for number, one in enumerate(found):
        width = len(one) if kind == "padded" else 0
        assert same(one, entries(kind, number, width)), (number, one)


@ranks(1, 3)
@pytest.mark.parametrize("seed", range(6))
def test_a_model_returns_a_structure_of_such_outputs(seed, world_size):
    pick = random.Random(10 * world_size + seed)  # noqa: S311 - no secret
    kinds, structure = pick.choices([*KINDS], k=3), pick.choice([*STRUCTURES])
    num_samples, batch_size = pick.randrange(7, 20), pick.randrange(4, 7)
    handler = NNHandler(Model, kinds=kinds, wrap=STRUCTURES[structure])
    found = handler.predict(torch.arange(float(num_samples)), batch_size=batch_size, all_ranks=True)
    for kind, part in zip(kinds, parts_in(found, structure), strict=True):
        assert part is None if kind == "nothing" else len(part) == num_samples
        for number, one in enumerate(part or [] if not isinstance(part, torch.Tensor | np.ndarray) else part):
            assert same(one, entries(kind, number, len(one) if kind == "padded" else 0)), (kind, number)


class Detections(Dataset):
    """Images of unlike sizes, as detectors take them."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.full((3, 2 + index, 2), float(index)), {"boxes": torch.zeros(index, 4)}


def in_lists(samples):
    return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images):
        return [{"boxes": torch.full((image.shape[1] - 2, 4), float(image.mean()))} for image in images]


@ranks(1, 2)
@pytest.mark.parametrize("passes", ["dataset", "loader", "batches"])
def test_a_detector_takes_and_returns_lists(passes, rank, world_size):
    handler, data = NNHandler(Detector), Detections()
    mine = DistributedSampler(data, world_size, rank, shuffle=False)
    if passes == "dataset":
        found = handler.predict(data, batch_size=3, collate_fn=in_lists, all_ranks=True)
        numbers = range(7)
    else:
        loader = DataLoader(data, 3, sampler=mine, collate_fn=in_lists)
        found = handler.predict(loader if passes == "loader" else iter_again(loader), all_ranks=True)
        numbers = [
            index for one in range(world_size) for index in DistributedSampler(data, world_size, one, shuffle=False)
        ]
    assert [len(one["boxes"]) for one in found] == [*numbers]
    assert all((one["boxes"] == number).all() for one, number in zip(found, numbers, strict=True))


class iter_again:  # noqa: N801 - a function to its user
    """Batches of a loader that does not say how many samples they have."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@ranks(1, 2)
def test_what_has_not_one_entry_for_each_sample_is_refused_with_the_remedy():
    def predict(outputs, **options):
        handler = NNHandler(nn.Identity)
        handler.set_loss_fn(nn.functional.mse_loss, forward=lambda _, batch: (outputs(batch[0]), None))
        return handler.predict(TensorDataset(torch.arange(16.0)), batch_size=4, all_ranks=True, **options)

    refused = {
        r"got a Tensor of shape \(\) for a batch of 4. Return tensors .* or pass samples=": lambda x: x.mean(),
        r"got a Tensor of shape \(3, 4\) for a batch of 4": lambda x: x.expand(3, 4),
        "got a list of 3 for a batch of 4": lambda _: ["a", "b", "c"],
        "got a str for a batch of 4": lambda _: "four",
        "a list must have one entry for each sample, or be one of several outputs, got one of 4": lambda x: [
            x,
            x,
            x,
            x,
        ],
    }
    for told, outputs in refused.items():
        with pytest.raises((ValueError, RuntimeError), match=told):
            predict(outputs)
        DistributedManager().barrier()
    assert predict(lambda x: x.mean(), samples=lambda mean: [float(mean)] * 4)[::4] == [1.5, 5.5, 9.5, 13.5]
    with pytest.raises((ValueError, RuntimeError), match="got a list of 1 for a batch of 4"):
        predict(lambda x: x.mean(), samples=lambda mean: [mean])
    found = predict(lambda x: [x, x, x, x], samples=lambda columns: torch.stack(columns, dim=1))
    assert [row.tolist() for row in found] == [[float(number)] * 4 for number in range(16)]
    first, second = predict(lambda x: (x, x + 1, x, x))[:2]
    assert torch.equal(first + 1, second)


@ranks(1, 2)
def test_padded_outputs_of_unlike_widths_are_padded_by_a_function_of_the_program():
    handler = NNHandler(Model, kinds=["padded"], wrap=lambda parts: parts[0])
    rows = handler.predict(torch.arange(11.0), batch_size=1, all_ranks=True)
    assert [len(row) for row in rows] == [size_of(number) for number in range(11)]
    padded = handler.predict(
        torch.arange(11.0), batch_size=1, all_ranks=True, pad=lambda own: pad_sequence(own, batch_first=True)
    )
    assert torch.equal(padded, pad_sequence(rows, batch_first=True))
