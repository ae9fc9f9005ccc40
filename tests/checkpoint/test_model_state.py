"""The names in a model's state, whatever is wrapped around it."""

import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from distman.checkpoint import load, load_model_state, model_state, save
from distman.testing import ranks


class Model(torch.nn.Module):
    """Has parts with the names that wrappers use."""

    def __init__(self, value=0.0):
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.head = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


class OnlyModule(torch.nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.module = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(self.module.weight, value)


def compiled(model):
    return torch.compile(model, backend="eager")


def part_compiled(model):
    model.module = compiled(model.module)
    return model


def part_parallel(model):
    model.module = torch.nn.DataParallel(model.module)
    return model


WRAPPERS = {
    "bare": lambda model: model,
    "DataParallel": torch.nn.DataParallel,
    "compiled": compiled,
    "compiled DataParallel": lambda model: compiled(torch.nn.DataParallel(model)),
    "DataParallel of compiled": lambda model: torch.nn.DataParallel(compiled(model)),
    "a part compiled": part_compiled,
    "a part in DataParallel": part_parallel,
}


@pytest.mark.parametrize("source", WRAPPERS)
def test_the_names_are_those_of_the_bare_model(source):
    for kind in (Model, OnlyModule):
        state = model_state(WRAPPERS[source](kind(1.0)))
        bare = kind(1.0).state_dict()
        assert list(state) == list(bare)
        assert state._metadata == bare._metadata


@pytest.mark.parametrize("source", WRAPPERS)
def test_a_state_goes_from_any_wrapper_into_any_other(source):
    for kind, target in itertools.product((Model, OnlyModule), WRAPPERS):
        wrapped = WRAPPERS[source](kind(1.0))
        states = [model_state(wrapped)]
        if source != "a part in DataParallel" or target == source:  # nothing common to all names tells this wrapper
            states.append(wrapped.state_dict())
        for state in states:
            model = WRAPPERS[target](kind())
            assert load_model_state(model, state) == ([], [])
            assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in model.parameters())


@pytest.mark.parametrize("source", WRAPPERS)
def test_what_is_missing_is_named_bare(source):
    state = model_state(Model(1.0))
    del state["head.bias"]
    state["tail.bias"] = torch.ones(1)
    model = WRAPPERS[source](Model())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)(?s:.*)head\.bias(?s:.*)Unexpected key\(s\)(?s:.*)tail"):
        load_model_state(model, state)
    assert load_model_state(model, state, strict=False) == (["head.bias"], ["tail.bias"])


def test_a_part_of_a_model_is_found_in_a_wrapped_state():
    state = {name: value for name, value in torch.nn.DataParallel(Model(1.0)).state_dict().items() if "head" in name}
    model = Model()
    missing, unexpected = load_model_state(model, state, strict=False)
    assert unexpected == []
    assert {name.split(".")[0] for name in missing} == {"module"}
    assert torch.equal(model.head.weight, torch.ones(1, 2))


def test_the_versions_of_modules_are_passed_on():
    old = torch.nn.BatchNorm1d(2).state_dict()  # version 1 had no count of batches, and strict loading forgives it
    del old["num_batches_tracked"]
    old._metadata[""]["version"] = 1
    state = type(old)((f"module.{name}", value) for name, value in old.items())
    state._metadata = type(old)({"": {"version": 1}, "module": {"version": 1}})
    assert load_model_state(torch.nn.BatchNorm1d(2), state) == ([], [])
    assert load_model_state(compiled(torch.nn.BatchNorm1d(2)), state) == ([], [])


@ranks(2)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_from_a_distributed_model_into_a_file_and_back(tmp_path, is_wrapped):
    model = DistributedDataParallel(Model(1.0))
    save({"model": model_state(model)}, tmp_path / "state.pt")
    state = load(tmp_path / "state.pt")["model"]
    assert list(state) == list(Model().state_dict())
    other = DistributedDataParallel(Model(2.0)) if is_wrapped else Model(2.0)
    load_model_state(other, state)
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in other.parameters())
    load_model_state(other, model.state_dict())
