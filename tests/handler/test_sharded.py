"""A training with a sharded model is that of ranks which have the whole model each, and that of one process."""

import io
import json
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from distman import DistributedManager
from distman._base.seeds import seed_of
from distman.checkpoint import load, save_sharded
from distman.errors import CheckpointError, DistmanError, JobFailed, NonFiniteLossError, RankFailedError
from distman.handler import ModelCheckpoint, NNHandler
from distman.testing import kill_rank, ranks

from ..smaller_jobs import job
from .problems import GLOBAL_BATCH, Normed, make_handler, reference, regression

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def sharded_handler(batch_size, **kwargs):
    return make_handler(batch_size, strategy="fsdp", strategy_options={"shard": nn.Linear}, **kwargs)


def weights(handler):
    """Return the whole weights, on every rank."""
    named = dict(handler.module.named_parameters())
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).detach() for name, one in named.items()}


@ranks(1, 2)
def test_the_curve_is_that_of_ddp_and_of_one_process(world_size):
    options = {"accumulate": 2, "clip_norm": 0.5, "ema_decay": 0.5}
    for dtype, tolerance in TOLERANCES.items():
        curves = []
        for make in (make_handler, sharded_handler):
            handler = make(GLOBAL_BATCH // world_size, dtype=dtype)
            handler.set_val_loader(regression(dtype), batch_size=3)  # rank 0 has one more batch
            handler.train(2, **options)
            curves.append((handler.history["loss"], handler.history["val_loss"], weights(handler)))
        torch.testing.assert_close(curves[0], curves[1], rtol=tolerance, atol=tolerance)
        expected = reference(2, accumulate=2, clip_norm=0.5, dtype=dtype)[0]
        assert curves[1][0] == pytest.approx(expected, rel=1e-9 if dtype == torch.float64 else 1e-5)


@ranks(4)
def test_hybrid_sharding_has_the_same_curve():
    DistributedManager().initialize_mesh((2, 2), ("replicas", "shards"))
    mesh = ("replicas", "shards")
    sharded = make_handler(4, strategy="fsdp", strategy_options={"mesh": mesh, "reshard_after_forward": False})
    assert [len(one.to_local()) for one in sharded.module.first.parameters()] == [4, 4]
    plain = make_handler(4, strategy_options={"bucket_cap_mb": 1})
    for handler in (plain, sharded):
        handler.set_val_loader(regression(num_samples=5), batch_size=3)  # nothing for ranks 2 and 3
        handler.train(2, clip_norm=0.5, accumulate=2, ema_decay=0.5)
    assert sharded.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-12)
    assert sharded.history["val_loss"] == pytest.approx(plain.history["val_loss"], rel=1e-12)


@ranks(2)
def test_weights_that_are_kept_on_the_host_are_trained_saved_and_resumed(tmp_path):
    offloads = {"shard": nn.Linear, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    options, curves = {"accumulate": 2, "clip_norm": 0.5, "ema_decay": 0.5}, []
    for settings in ({}, {"strategy": "fsdp", "strategy_options": offloads}):
        first, second = make_handler(8, **settings), make_handler(8, **settings)
        first.train(1, **options)
        first.save(tmp_path / "half.pt")
        second.load(tmp_path / "half.pt")
        second.train(3, **options)
        curves.append((second.history["loss"], weights(second)))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-12, atol=1e-12)


@ranks(2)
def test_compiled_and_with_mixed_precision():
    plain = make_handler(8).train(2)["loss"]
    options = {"shard": nn.Linear, "checkpoint_activations": True}
    compiled = make_handler(8, strategy="fsdp", strategy_options=options, compile={"backend": "eager"})
    compiled.set_val_loader(regression(), batch_size=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's tracer looks at that of each input
        assert compiled.train(2)["loss"] == pytest.approx(plain, rel=1e-12)
    assert [*compiled.whole_state_dict()["model"]["module"]] == [*compiled.module.state_dict()] != []
    for amp in ("bf16", "fp16"):
        expected = make_handler(8, dtype=torch.float32).train(1, amp=amp, clip_norm=1.0)["loss"]
        handler = sharded_handler(8, dtype=torch.float32)
        assert handler.train(1, amp=amp, clip_norm=1.0)["loss"] == pytest.approx(expected, rel=1e-3)
    options = {"shard": nn.Linear, "mixed_precision": "bf16"}
    handler = make_handler(8, dtype=torch.float32, strategy="fsdp", strategy_options=options)
    expected = make_handler(8, dtype=torch.float32).train(1)["loss"]
    assert handler.train(1)["loss"] == pytest.approx(expected, rel=0.02)
    skipped = []
    for make in (make_handler, sharded_handler):
        overflow = make(8, dtype=torch.float32)
        overflow.set_loss_fn(lambda outputs, targets: 1e2 * nn.functional.mse_loss(outputs, targets))
        skipped += overflow.train(4, amp="fp16")["skipped"]
    assert skipped[:4] == skipped[4:]
    assert 0 < sum(skipped[:4]) < 20  # too large a scale of the loss in some of the steps


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, t, x):
        return -self.layer(x)


@ranks(2)
def test_sampling_and_densities_wait_for_nobody_in_a_step(rank):
    found = []
    for strategy in ("ddp", "fsdp"):
        handler = NNHandler(Score, seed=0, strategy=strategy)
        handler.set_sde("vp")
        likelihood = handler.log_likelihood(torch.ones(3, 2), seed=0)  # two on rank 0, one on rank 1
        handler.sample((1, 2), num_steps=3, seed=0)
        found.append((likelihood, handler.sample((3, 2), num_steps=3, seed=0, rank_zero=True)))
        handler.set_optimizer(torch.optim.SGD, lr=0.1)
        handler.set_train_loader(torch.ones(8, 2), batch_size=2)
        found[-1] = (*found[-1], handler.train(1)["loss"])
    torch.testing.assert_close(found[0], found[1])
    if rank == 0:
        with pytest.raises(DistmanError, match="must be called within a training step"):
            handler(torch.ones(1), torch.ones(1, 2))


@ranks(1, 2)
def test_wrong_options_are_refused_before_the_model_is_made():
    for options, kind, message in (
        ({"strategy": "zero"}, ValueError, "strategy must be one of ddp, fsdp, got 'zero'"),
        ({"strategy": "fsdp", "strategy_options": {"reshard_after_forward": 2}}, TypeError, "True or False, got 2"),
        ({"strategy": "fsdp", "strategy_options": {"shards": Small}}, TypeError, "Did you mean shard"),
        ({"strategy_options": {"shard": Small}}, TypeError, r"option that wrap_ddp\(\) takes"),
    ):
        with pytest.raises(kind, match=message):
            NNHandler(nn.Linear, in_features=1, out_features=1, **options)


def raises_on_rank_1(_outputs, _targets):
    if DistributedManager().rank == 1:
        raise OSError("of one rank alone")
    return _outputs.square().mean()


@ranks(2, manager=False)
def test_an_error_in_a_step_of_one_rank_is_heard_by_the_others(rank, monkeypatch):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    handler = sharded_handler(8)
    handler.set_loss_fn(raises_on_rank_1)
    with pytest.raises(OSError if rank else JobFailed, match="of one rank alone"):
        handler.train(1)


def dies_on_rank_1(outputs, _targets):
    kill_rank(1)
    return outputs.square().mean()


@ranks(3, dies=[1], manager=False)
def test_the_death_of_a_rank_in_a_step_ends_the_wait_of_the_others(monkeypatch):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    handler = sharded_handler(8)
    handler.set_loss_fn(dies_on_rank_1)
    with pytest.raises(JobFailed, match="rank 1"):
        handler.train(1)


class Small(nn.Module):
    """A parameter with fewer elements than ranks, tied ones, unused ones, a buffer that training writes."""

    def __init__(self):
        super().__init__()
        self.normed = Normed()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.last.weight = self.normed.last.weight
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs):
        return self.scale * (self.normed(inputs) + self.last(inputs))


def small_handler(strategy, **kwargs):
    handler = NNHandler(Small, seed=0, strategy=strategy, **kwargs)
    handler.set_optimizer(torch.optim.AdamW, lr=0.05)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(num_samples=48), batch_size=4)
    handler.set_val_loader(regression(num_samples=7), batch_size=4)
    return handler


@pytest.mark.torch("2.12")
@ranks(3)
def test_small_tied_and_unused_parameters_and_empty_parts():
    DistributedManager().find_unused_parameters = True
    plain, sharded = small_handler("ddp"), small_handler("fsdp")
    for handler in (plain, sharded):
        handler.train(2, clip_norm=1.0, ema_decay=0.9)
    torch.testing.assert_close(sharded.history["loss"], plain.history["loss"], rtol=1e-12, atol=0)
    torch.testing.assert_close(sharded.history["val_loss"], plain.history["val_loss"], rtol=1e-12, atol=0)
    assert sharded.module.last.weight is sharded.module.normed.last.weight
    predictions = sharded.predict(regression(num_samples=7), all_ranks=True)
    torch.testing.assert_close(predictions, plain.predict(regression(num_samples=7), all_ranks=True))


@ranks(2)
def test_what_may_change_between_two_runs():
    handler = sharded_handler(8)
    handler.module.first.requires_grad_(requires_grad=False)
    handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda module: module.second.parameters())
    before = weights(handler)
    handler.train(1)
    handler.module.first.requires_grad_()
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.train(2)
    assert not torch.equal(weights(handler)["first.weight"], before["first.weight"])
    with pytest.raises(DistmanError, match=r"must be called within a training step.*call handler\.predict\(\)"):
        handler(torch.zeros(1, 4))
    handler.train(3, ema_decay=0.5)
    with pytest.raises(DistmanError, match="the average of a sharded model is not a module"):
        handler.ema_module  # noqa: B018 - a property


def fails(outputs, _):
    raise KeyError(outputs.dtype)


def fails_backwards(outputs, targets):
    outputs.register_hook(lambda grad: fails(grad, targets))
    return outputs.square().mean()


@ranks(2)
def test_a_step_that_raised_is_not_forgotten_in_silence_where_torch_cannot(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    handler = sharded_handler(8)
    handler.train(1)
    handler.train(2)
    handler.set_loss_fn(fails_backwards)
    with pytest.raises(KeyError):
        handler.train(3)
    with pytest.raises(RuntimeError, match=r"cannot forget the step with torch .*\. Install torch 2\.10 or later"):
        handler.train(3)


@ranks(2)
def test_a_training_goes_on_after_a_step_that_raised(tmp_path):
    handler, alike = sharded_handler(8), sharded_handler(8)
    handler.train(1)
    handler.set_loss_fn(fails)
    with pytest.raises(KeyError):
        handler.train(2)
    handler.set_loss_fn(nn.functional.mse_loss)
    alike.train(1)
    alike.train(2)
    alike.save(tmp_path / "state.pt")
    handler.load(tmp_path / "state.pt")
    assert handler.train(3)["loss"] == alike.train(3)["loss"]


@ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_all_at_the_same_step_and_cannot_be_saved(value, rank, tmp_path):
    handler = sharded_handler(8)
    calls = []

    def poisoned(outputs, targets):
        calls.append(1)
        return nn.functional.mse_loss(outputs, targets) * (value if rank == 1 and len(calls) == 2 else 1.0)

    handler.set_loss_fn(poisoned)
    with pytest.raises(NonFiniteLossError, match=rf"must be finite in step 1, got {value} on rank 1"):
        handler.train(1, clip_norm=1.0)
    calls.clear()
    with pytest.raises(NonFiniteLossError, match="have spoilt the model"):
        handler.train(1, check_every=100)
    for forbidden in (
        lambda: handler.save(tmp_path / "x"),
        lambda: handler.save(tmp_path / "x", sharded=True),
        lambda: handler.export(tmp_path / "x"),
    ):
        with pytest.raises(NonFiniteLossError):
            forbidden()
    assert not [*tmp_path.iterdir()]


OPTIONS = {"clip_norm": 0.5, "ema_decay": 0.5}


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_resumed_after_any_save_it_is_the_training_that_was_never_cut_off(tmp_path, world_size, sharded):
    handler = small_handler("fsdp")
    handler.auto_save(tmp_path / "auto", every_steps=8, every_epochs=None, keep=99, sharded=sharded)
    handler.add_callback(ModelCheckpoint(tmp_path / "best", keep=99, sharded=sharded))
    handler.train(2, **OPTIONS)
    kept = tmp_path / ("folder" if sharded else "file.pt")
    handler.save(kept, sharded=sharded)
    handler.train(3, **OPTIONS)
    numbered = {"auto": 8, "best": 12 // world_size}  # within the second epoch, and after the first
    suffix = "" if sharded else ".pt"
    saved = [f"{folder}/checkpoint-{step:08}{suffix}" for folder, step in numbered.items()]
    for name in (*saved, kept.name) if sharded else saved[:1]:
        other = small_handler("fsdp")
        other.load(tmp_path / name)
        other.train(3, **OPTIONS)
        assert (other.history["loss"], other.history["val_loss"]) == (
            handler.history["loss"],
            handler.history["val_loss"],
        )
        torch.testing.assert_close(weights(other), weights(handler), rtol=0, atol=0)
    made = NNHandler(Small, strategy="fsdp")
    made.load(kept)
    assert (made.num_steps, made.history["loss"]) == (24 // world_size, handler.history["loss"][:2])


class PartlyCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.compile(nn.Linear(3, 3), backend="eager")
        self.last = nn.Linear(3, 1)

    def forward(self, inputs):
        return self.last(self.first(inputs))


@pytest.mark.torch("2.12")
@ranks(2)
def test_the_average_of_a_part_that_is_compiled_has_its_bare_name(tmp_path):
    handler = NNHandler(PartlyCompiled, seed=0, strategy="fsdp")
    handler.set_optimizer(torch.optim.SGD, lr=0.5)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(torch.utils.data.TensorDataset(torch.randn(8, 3), torch.ones(8, 1)), batch_size=2)
    handler.train(1, ema_decay=0.9)
    inputs = torch.arange(12.0).reshape(4, 3)
    expected = handler.predict(inputs, all_ranks=True)
    handler.export(tmp_path / "weights.pt")
    plain = PartlyCompiled()
    plain.first = nn.Linear(3, 3)
    plain.load_state_dict(load(tmp_path / "weights.pt"))
    torch.testing.assert_close(plain(inputs), expected)


@ranks(1)
def test_a_folder_that_lacks_a_part_is_refused_by_its_name(tmp_path):
    file = io.BytesIO()
    torch.save({"model": {}, "history": {}}, file)
    rest = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    save_sharded({"parts": {"weight": torch.ones(2)}, "rest": rest}, tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"has no .*training"):
        make_handler(GLOBAL_BATCH).load(tmp_path / "folder")


@pytest.mark.torch("2.12")
@ranks(3, manager=False)
def test_a_program_that_is_started_again_on_fewer_ranks_resumes_from_parts_as_from_files(rank, tmp_path):
    dist.destroy_process_group()
    curves = {}
    for world_size, strategy, epochs in ((3, "fsdp", 1), (2, "ddp", 2), (2, "fsdp", 3), (1, "fsdp", 4)):
        if rank < world_size:
            with job(world_size, rank, tmp_path / f"store {epochs}"):
                DistributedManager().find_unused_parameters = True
                for sharded in (False, True):
                    handler = small_handler(strategy)
                    handler.auto_save(tmp_path / f"auto {sharded}", sharded=sharded)
                    curves[sharded] = handler.train(epochs, **OPTIONS)["loss"]
                assert len(curves[True]) == epochs
                assert curves[True] == pytest.approx(curves[False], rel=1e-12)


def read_safetensors(path):
    """Read what the specification says, and nothing else."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    contents = json.loads(data[8:start])
    assert (start % 8, contents.pop("__metadata__")) == (0, {"format": "pt"})
    types, end, state = {"F64": torch.float64, "I64": torch.int64}, 0, {}
    for name, one in contents.items():
        assert one["data_offsets"][0] == end  # without holes
        end = one["data_offsets"][1]
        part = bytearray(data[start:][slice(*one["data_offsets"])])
        state[name] = torch.frombuffer(part, dtype=types[one["dtype"]]).view(one["shape"])
    assert len(data) == start + end
    return state


@pytest.mark.torch("2.12")
@ranks(1, 2)
def test_the_whole_weights_are_exported_for_other_programs(tmp_path):
    for strategy in ("ddp", "fsdp"):
        DistributedManager().find_unused_parameters = True
        handler = small_handler(strategy)
        handler.train(1)
        for decay in (None, 0.5):
            handler.train(2 if decay is None else 3, ema_decay=decay)
            expected = handler.predict(regression(num_samples=5), all_ranks=True)
            handler.export(tmp_path / "weights.pt")
            handler.export(tmp_path / "weights.safetensors")
            plain = Small().eval()
            for state in (load(tmp_path / "weights.pt"), read_safetensors(tmp_path / "weights.safetensors")):
                plain.load_state_dict(state)
                with torch.no_grad():
                    torch.testing.assert_close(plain(regression(num_samples=5).tensors[0]), expected)
            DistributedManager().barrier()
    handler.save(tmp_path / "folder", sharded=True)
    for name in ("weights.pt", "folder"):
        for strategy in ("ddp", "fsdp"):
            begun = small_handler(strategy)
            assert begun.load(tmp_path / name, only="model")["taken"]
            if name == "folder":  # else averages
                torch.testing.assert_close(weights(begun), weights(handler), rtol=0, atol=0)
    handler = small_handler("fsdp")
    handler.module.register_buffer("strange", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(
        (TypeError, ValueError, RankFailedError),
        match=r"strange must be a tensor of a type that safetensors has, got .*128",
    ):
        handler.export(tmp_path / "weights.safetensors")
    assert set(read_safetensors(tmp_path / "weights.safetensors")) == set(Small().state_dict())


@pytest.mark.torch("2.12")
@ranks(3, manager=False)
def test_what_three_ranks_saved_is_resumed_by_two_and_by_one_with_either_strategy(rank, tmp_path):
    dist.destroy_process_group()
    with job(3, rank, tmp_path / "three"):
        first = small_handler("fsdp")
        first.train(1, **OPTIONS)
        first.save(tmp_path / "file.pt")
        first.save(tmp_path / "folder", sharded=True)
        with pytest.raises(FileNotFoundError if rank == 0 else (FileNotFoundError, RankFailedError)):
            first.load(tmp_path / "nothing")
        expected = weights(first)
        moments = first.whole_state_dict()["training"]["optimization"]["optimizers"]["optimizer"]["state"]
    for world_size in (2, 1):
        if rank < world_size:
            with job(world_size, rank, tmp_path / f"{world_size}"):
                DistributedManager().find_unused_parameters = True
                curves = []
                pairs = [(strategy, name) for strategy in ("ddp", "fsdp") for name in ("file.pt", "folder")]
                for strategy, name in pairs if world_size == 2 else pairs[1:3]:
                    handler = small_handler(strategy)
                    handler.load(tmp_path / name)
                    torch.testing.assert_close(weights(handler), expected, rtol=0, atol=0)
                    handler.train(2, **OPTIONS)
                    curves.append((handler.history["loss"], handler.history["val_loss"]))
                torch.testing.assert_close(curves, [curves[0]] * len(curves), rtol=1e-12, atol=0)
                assert [*load(tmp_path / "file.pt")["model"]["module"]] == [*Small().state_dict()]
                if rank == 0:
                    assert all(one["exp_avg"].shape == one["exp_avg_sq"].shape != (0,) for one in moments.values())
                save_sharded({"weight": torch.ones(1)}, tmp_path / f"no training {world_size}")
                with pytest.raises(CheckpointError, match="holds no training"):
                    handler.load(tmp_path / f"no training {world_size}")


class Table(nn.Module):
    """Has a parameter and a buffer, and no function that resets them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(4, dtype=torch.float64))

    def forward(self, inputs):
        return inputs * self.scale + self.offset


class Large(nn.Module):
    """A model with weights that are tied, made without memory for them."""

    def __init__(self, device="meta"):
        super().__init__()
        with torch.device(device):
            self.table = Table()
            self.blocks = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
            self.first, self.last = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
            self.last.weight = self.first.weight

    def forward(self, inputs):
        return self.last(self.blocks(self.first(self.table(inputs))).tanh()).sum(1, keepdim=True)


def initialize(module):
    if isinstance(module, Table):
        nn.init.constant_(module.scale, 0.5)
        module.offset.fill_(0.25)
    else:
        nn.init.normal_(module.weight, std=0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@ranks(1, 3)
def test_a_model_on_the_meta_device_is_made_in_parts_alike_on_any_number_of_ranks(world_size, tmp_path):
    options = {"shard": is_block, "initialize": initialize}
    handler = NNHandler(Large, seed=1, strategy="fsdp", strategy_options=options)
    assert not any(one.is_meta for one in [*handler.module.parameters(), *handler.module.buffers()])
    assert handler.module.last.weight is handler.module.first.weight
    assert handler.module.table.offset.tolist() == [0.25] * 4
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=12 // world_size)
    losses = handler.train(2)["loss"]
    handler.save(tmp_path / "model.pt")
    alone = Large("cpu")
    torch.manual_seed(seed_of(1))
    for part in [*reversed(alone.blocks), alone.table, alone.first]:
        initialize(part)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    inputs, targets = regression().tensors
    expected = []
    for epoch in range(2):
        order = torch.randperm(65, generator=torch.Generator().manual_seed(seed_of(1, epoch)))
        total = 0.0
        for chosen in order.split(12):
            loss = nn.functional.mse_loss(alone(inputs[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(chosen) / 65
        expected.append(total)
    assert losses == pytest.approx(expected, rel=1e-9)
    resumed = NNHandler(Large, seed=2, strategy="fsdp", strategy_options={"initialize": initialize})
    resumed.load(tmp_path / "model.pt", only="model")
    found = weights(resumed)
    assert all(torch.equal(found[name], value) for name, value in weights(handler).items())


def is_block(module):
    return isinstance(module, nn.Linear) and module.bias is not None


@ranks(1, 2)
def test_a_model_on_the_meta_device_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="a model on the meta device must be sharded, got strategy='ddp'"):
        NNHandler(Large)
    with pytest.raises(
        ValueError, match=r"must be initialized, got table of Table without reset_parameters\(\). Pass init"
    ):
        NNHandler(Large, strategy="fsdp")
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    DistributedManager().wrap_fsdp(model)
    assert not model.weight.is_meta
