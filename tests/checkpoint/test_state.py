"""What may be saved, and where in a state something lies that may not."""

import collections
import enum
import io

import numpy as np
import pytest
import safetensors.torch
import torch

from distman.checkpoint._location import locate
from distman.checkpoint._state import check_state, copy_to_host, without_unused_memory, write_safetensors


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


def itself():
    state = {"list": []}
    state["list"].append(state)
    return state


def with_attribute(tensor, value):
    tensor.attribute = value
    return tensor


def without_memory(tensor, num_bytes=0):
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


REFUSED = {
    "a lambda": ({"a": {"b": [1, lambda: 0]}}, r"state['a']['b'][1] must be"),
    "a class": ([{"cls": Point}], r"state[0]['cls'] must be"),
    "a named tuple": ({"p": Point(1, 2)}, r"state['p'] must be"),
    "a number of numpy": ({"loss": np.float64(1.0)}, r"state['loss'] must be"),
    "an array": ({"loss": np.zeros(2)}, r"state['loss'] must be"),
    "an enum": ({1: Colour.RED}, r"state[1] must be"),
    "a key": ({Colour.RED: 1}, r"the key <Colour.RED: 1> of state must be"),
    "an integer too long for the reader": ({"n": 2**3000}, r"state['n'] must be"),
    "a defaultdict": ({"d": collections.defaultdict(list)}, r"state['d'] must be"),
    "itself": (itself(), r"state['list'][0] must not be a part of itself"),
    "an attribute of a tensor": ({"t": with_attribute(torch.ones(1), print)}, r"state['t'] must be"),
    "a tensor whose memory was freed": ({"t": [without_memory(torch.ones(3, 2))]}, r"state['t'][0] must have memory"),
    "one of which a part was freed": ([without_memory(torch.ones(6)[2:], 20)], r"state[0] must have memory"),
    "a parameter of which all was": (without_memory(torch.nn.Parameter(torch.ones(1))), r"state must have memory"),
    "a module": ({"m": torch.nn.Linear(1, 1)}, r"state['m'] must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_reader_would_refuse_is_found_with_its_place(name):
    state, message = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        check_state(state)
    assert str(caught.value).startswith(message)


ACCEPTED = {
    "plain": {"a": [1, (2.0, "x", None, True)], 3: {}},
    "an ordered dict with attributes": torch.nn.BatchNorm1d(2).state_dict(),
    "an optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "what torch has besides": {
        "size": torch.Size([1]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "complex": 1j,
        "set": {1},
        "bytes": b"x",
        "sparse": torch.eye(2).to_sparse(),
        "counter": collections.Counter("a"),
    },
    "a long integer": {"seed": 2**127},
    "twice the same": [[0]] * 2,
    "no more memory than needed": without_memory(torch.arange(6.0).reshape(3, 2)[1:, ::2].expand(2, 2), 20),
    "nothing": [torch.empty(0, 3), without_memory(torch.ones(4)[:0])],
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # a newer torch says that it takes time
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_can_be_loaded(name):
    check_state(ACCEPTED[name])
    for state in (ACCEPTED[name], copy_to_host(ACCEPTED[name])):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert repr(loaded) == repr(ACCEPTED[name])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6).expand(2, 6),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.empty(0),
        torch.ones(2, requires_grad=True),
    ],
    ids=str,
)
def test_a_copy_is_equal_and_shares_nothing(tensor):
    copied = copy_to_host([tensor])[0]
    assert (copied.shape, copied.dtype, copied.layout) == (tensor.shape, tensor.dtype, tensor.layout)
    assert copied.requires_grad == tensor.requires_grad
    assert str(copied) == str(tensor)
    if tensor.layout == torch.strided and tensor.numel():
        assert copied.data_ptr() != tensor.data_ptr()


WHOLE = torch.view_as_complex(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)))
LAZY = {
    "conjugate": [WHOLE, WHOLE.conj(), WHOLE.conj(), WHOLE.conj().conj()],
    "negative": [WHOLE.imag, WHOLE.conj().imag],
    "a part": [WHOLE[1:3], WHOLE[1:3].conj(), WHOLE[1:3].imag, WHOLE[1:3].conj().imag],
}


@pytest.mark.parametrize("copied", [copy_to_host, without_unused_memory])
@pytest.mark.parametrize("name", LAZY)
def test_views_whose_signs_are_put_in_later_are_not_taken_for_their_base(name, copied):
    file = io.BytesIO()
    torch.save(copied(LAZY[name]), file)
    file.seek(0)
    for one, loaded in zip(LAZY[name], torch.load(file, weights_only=True), strict=True):
        assert torch.equal(loaded, one)


@pytest.mark.parametrize("name", LAZY)
def test_other_programs_read_the_signs_that_are_put_in_later(name, tmp_path):
    state = {str(number): one for number, one in enumerate(LAZY[name])}
    write_safetensors(state, locate(tmp_path / "weights.safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(loaded[key], one) for key, one in state.items())


def test_other_programs_get_no_tensor_whose_memory_was_freed(tmp_path):
    with pytest.raises(ValueError, match="weight must have memory"):
        write_safetensors({"weight": without_memory(torch.ones(3))}, locate(tmp_path / "weights.safetensors"))
    assert [*tmp_path.iterdir()] == []
