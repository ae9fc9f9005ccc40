"""What is asked of the class instead of an instance, or by a name that does not exist, is an error."""

import inspect
import pydoc
import typing
from unittest import mock

import pytest

from distman import DistributedManager


def is_property(name):
    return isinstance(inspect.getattr_static(DistributedManager, name), property)


PROPERTIES = [name for name in dir(DistributedManager) if is_property(name) and not name.startswith("_")]


def test_the_properties_are_seen():
    assert {"rank", "is_main", "device", "mesh_dims", "group_names", "broadcast_buffers"} <= set(PROPERTIES)


@pytest.mark.parametrize("is_initialized", [False, True])
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_of_the_class_is_an_error_that_shows_the_parentheses(name, is_initialized):
    if is_initialized:
        DistributedManager.initialize(device="cpu")
    with pytest.raises(AttributeError, match=rf"got the class .*\. Write DistributedManager\(\)\.{name}, with"):
        getattr(DistributedManager, name)


def test_a_subclass_is_named():
    class Own(DistributedManager):
        pass

    with pytest.raises(AttributeError, match=r"Write Own\(\)\.rank, with parentheses"):
        _ = Own.rank


def test_tools_find_the_properties_of_the_class():
    found, spec = dict(inspect.getmembers(DistributedManager)), mock.create_autospec(DistributedManager)
    text = pydoc.render_doc(DistributedManager, renderer=pydoc.plaintext)
    for name in PROPERTIES:
        assert isinstance(found[name], property)
        assert f" |  {name}\n" in text
        assert hasattr(spec, name)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_has_a_type(name):
    hints = typing.get_type_hints(inspect.getattr_static(DistributedManager, name).fget)
    assert hints["return"] is not typing.Any


@pytest.mark.parametrize("name", ["rnk", "group_sizes", "_rank", "__wrapped__"])
def test_a_name_that_does_not_exist_is_an_error(name):
    manager = DistributedManager.initialize(device="cpu")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(manager, name)


def test_an_error_within_a_property_is_not_taken_for_a_missing_name(monkeypatch):
    manager = DistributedManager.initialize(device="cpu")
    monkeypatch.setattr(DistributedManager, "process_index", property(lambda self: self._nothing), raising=False)
    with pytest.raises(AttributeError, match="has no attribute '_nothing'"):
        _ = manager.process_index
