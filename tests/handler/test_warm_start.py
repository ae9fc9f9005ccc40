"""A training may begin with the weights of another one, whoever saved them."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distman import DistributedManager
from distman.errors import CheckpointError
from distman.handler import NNHandler
from distman.testing import ranks

from .problems import Network, assert_same_on_all_ranks, make_handler

NAMES = ["first.weight", "first.bias", "second.weight", "second.bias"]


def weights():
    torch.manual_seed(5)
    return Network().state_dict()


def save_plain(path):
    torch.save(weights(), path)


def save_of_ddp(path):
    torch.save({f"module.{name}": value for name, value in weights().items()}, path)


def save_compiled(path):
    torch.save({"model_state_dict": {f"_orig_mod.{name}": one for name, one in weights().items()}, "epoch": 3}, path)


def save_with_a_compiled_block(path):
    torch.save({name.replace("first.", "first._orig_mod."): one for name, one in weights().items()}, path)


def save_of_lightning(path):
    state = {f"net.{name}": value for name, value in weights().items()}
    torch.save({"epoch": 3, "state_dict": state, "optimizer_states": [{"state": {0: torch.ones(2)}}]}, path)


def save_safetensors(path):
    save_file(weights(), path)


@ranks(2)
@pytest.mark.parametrize(
    "save",
    [save_plain, save_of_ddp, save_compiled, save_with_a_compiled_block, save_of_lightning, save_safetensors],
)
def test_weights_of_others_are_taken_on_all_ranks(save, rank, tmp_path):
    path = tmp_path / f"weights.{'safetensors' if save is save_safetensors else 'pt'}"
    if rank == 0:
        save(path)
    DistributedManager().barrier()
    handler = make_handler(8)
    taken = handler.load(path, only="model")
    assert taken == {"taken": NAMES, "missing": [], "misshapen": [], "unexpected": []}
    assert all(torch.equal(handler.module.state_dict()[name], value) for name, value in weights().items())
    assert handler.num_steps == 0
    handler.train(1)
    assert_same_on_all_ranks(handler.module)


def test_a_checkpoint_of_a_handler_gives_its_weights_alone(tmp_path):
    trained = make_handler(8)
    trained.train(1, ema_decay=0.5)
    trained.save(tmp_path / "saved.pt")
    handler = make_handler(8)
    handler.load(tmp_path / "saved.pt", only="model")
    assert torch.equal(handler.module.first.weight, trained.module.first.weight)
    assert (handler.num_steps, len(handler.history), handler.ema_module) == (0, 0, None)


def test_what_does_not_fit_is_told_and_left_out_if_asked(tmp_path, caplog):
    caplog.set_level("INFO")
    own = weights()
    del own["second.bias"]
    other = own | {"first.weight": torch.ones(3, 3), "third.weight": torch.ones(2)}
    torch.save({f"module.{name}": value for name, value in other.items()}, tmp_path / "other.pt")
    handler = make_handler(8)
    before = {name: value.clone() for name, value in handler.module.state_dict().items()}
    told = "taken: first.bias, second.weight; missing: second.bias; misshapen: first.weight; "
    with pytest.raises(CheckpointError, match=f"{told}unexpected: module.third.weight .*strict=False"):
        handler.load(tmp_path / "other.pt", only="model")
    assert all(torch.equal(value, before[name]) for name, value in handler.module.state_dict().items())
    taken = handler.load(tmp_path / "other.pt", only="model", strict=False)
    assert (taken["taken"], taken["missing"]) == (["first.bias", "second.weight"], ["second.bias"])
    assert (taken["misshapen"], taken["unexpected"]) == (["first.weight"], ["module.third.weight"])
    after = handler.module.state_dict()
    assert [name for name in NAMES if not torch.equal(after[name], before[name])] == taken["taken"]
    assert f"{tmp_path / 'other.pt'}: {told}" in caplog.text


@pytest.mark.parametrize("state", [{"epoch": 3}, [1], {0: torch.ones(1)}, {"elsewhere": torch.ones(1)}], ids=str)
def test_a_file_without_weights_of_the_model_is_refused(state, tmp_path):
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="the file must hold"):
        make_handler(8).load(tmp_path / "other.pt", only="model", strict=False)


@pytest.mark.parametrize("options", [{"only": "optimizer"}, {"strict": False}])
def test_a_training_is_restored_as_a_whole(options, tmp_path):
    with pytest.raises(ValueError, match="only must be 'model'"):
        make_handler(8).load(tmp_path / "none.pt", **options)


def test_names_that_end_alike_and_buffers_are_told_apart(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    saved = make()
    state = {f"net.0.{name}": value for name, value in saved.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "saved.pt")
    handler = NNHandler(make)
    assert handler.load(tmp_path / "saved.pt", only="model")["taken"]
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in handler.module.state_dict().items())


def test_files_of_others_are_led_to_the_call_that_takes_them(tmp_path):
    for save in (save_plain, save_of_lightning):
        save(tmp_path / "weights.pt")
        with pytest.raises(CheckpointError, match=r"Begin with the weights .*handler\.load\(path, only='model'\)"):
            make_handler(8).load(tmp_path / "weights.pt")


def test_a_model_with_a_compiled_block_takes_weights_without_one(tmp_path):
    save_plain(tmp_path / "weights.pt")
    handler = NNHandler(WithACompiledBlock)
    assert handler.load(tmp_path / "weights.pt", only="model")["taken"]


class WithACompiledBlock(Network):
    def __init__(self):
        super().__init__()
        self.first = torch.compile(self.first, backend="eager")
