"""Steps of one's own, on any number of ranks what a plain loop of torch does on one, and resumed bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import mse_loss, softplus
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman._base.seeds import seed_of
from distman.collectives import all_gather_objects
from distman.data import distributed_loader
from distman.errors import CheckpointError, DistmanError, NonFiniteLossError, PlanMismatchError
from distman.handler import Callback, NNHandler, Stepper
from distman.testing import ranks

from .problems import Network, assert_same_on_all_ranks, make_handler, regression

GLOBAL_BATCH = 12  # over 1, 2, 3 or 4 ranks
SEED = 1
RATES = {"discriminator": 0.02, "generator": 0.01}


def layers():
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = layers(), layers()


def points():
    """Return points on a circle, and where in the plane each of the generator's points comes from."""
    generator = torch.Generator().manual_seed(7)
    angles = 6.3 * torch.rand(65, generator=generator, dtype=torch.float64)
    latents = torch.randn(65, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1), latents)


def loss_of_discriminator(model, real, fake):
    return softplus(-model.discriminator(real)).mean() + softplus(model.discriminator(fake.detach())).mean()


def loss_of_generator(model, fake):
    return softplus(-model.discriminator(fake)).mean()


def adversarial(stepper, batch):
    real, latents = batch
    fake = stepper.module.generator(latents)
    d_loss = loss_of_discriminator(stepper.module, real, fake)
    stepper.backward(d_loss, "discriminator")
    stepper.step("discriminator")
    g_loss = loss_of_generator(stepper.module, fake)
    stepper.backward(g_loss, "generator")
    stepper.step("generator")
    return {"d_loss": d_loss, "g_loss": g_loss}


def plain(epochs, accumulate, clip_norm):
    """Return the losses of both in each epoch, by a loop over whole batches without the package."""
    torch.manual_seed(seed_of(SEED))
    model = Adversaries()
    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), lr=lr) for name, lr in RATES.items()}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers["generator"], 0.5)
    history = []
    for epoch in range(epochs):
        sums = torch.zeros(2, dtype=torch.float64)
        order = torch.randperm(65, generator=torch.Generator().manual_seed(seed_of(SEED, epoch)))
        for window in order.split(GLOBAL_BATCH * accumulate):
            parts = window.split(GLOBAL_BATCH)
            for part in parts:
                real, latents = (tensor[part] for tensor in points().tensors)
                share, is_last = len(part) / len(window), part is parts[-1]
                fake = model.generator(latents)
                d_loss = loss_of_discriminator(model, real, fake)
                take(model.discriminator, optimizers["discriminator"], d_loss * share, clip_norm, is_last)
                g_loss = loss_of_generator(model, fake)
                take(model.generator, optimizers["generator"], g_loss * share, clip_norm, is_last)
                sums += torch.stack([d_loss, g_loss]).detach() * len(part)
        history.append((sums / 65).tolist())
        schedule.step()
    return history


def take(part, optimizer, loss, clip_norm, is_last):
    for parameter, own in zip(
        part.parameters(), torch.autograd.grad(loss, [*part.parameters()], retain_graph=True), strict=True
    ):
        parameter.grad = own if parameter.grad is None else parameter.grad + own
    if is_last:
        clip_grad_norm_(part.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()


class CutOffError(Exception):
    pass


class CutsOff(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, handler, step):
        if step == self.step:
            raise CutOffError


class Averages(Callback):
    """Averages the weights after each step."""

    average = None

    def on_step_end(self, handler, step):
        weights = [parameter.detach().clone() for parameter in handler.module.parameters()]
        pairs = zip(self.average or weights, weights, strict=True)
        self.average = [0.9 * average + 0.1 * own for average, own in pairs]


def make_gan(*, cut_at=None, function=adversarial):
    handler = NNHandler(Adversaries, seed=SEED)
    for name, lr in RATES.items():
        handler.set_optimizer(
            torch.optim.Adam, name=name, lr=lr, parameters=lambda model, name=name: getattr(model, name).parameters()
        )
    handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, name="generator", gamma=0.5)
    handler.set_step(function)
    handler.set_train_loader(points(), batch_size=GLOBAL_BATCH // DistributedManager().world_size)
    if cut_at is not None:
        handler.add_callback(CutsOff(cut_at))
    return handler


def records(handler):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in handler.history]


@ranks(1, 3)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_adversaries_learn_what_they_learn_in_a_plain_loop_and_resumed_bit_for_bit(accumulate, tmp_path):
    options = {"accumulate": accumulate, "clip_norm": 0.05, "ema_decay": 0.9}
    whole, averages = make_gan(), Averages()
    whole.add_callback(averages)
    whole.train(2, **options)
    for own, average in zip(whole.ema_module.parameters(), averages.average, strict=True):
        torch.testing.assert_close(own.detach(), average, rtol=1e-12, atol=0)
    expected = plain(2, accumulate, 0.05)
    found = list(zip(whole.history["d_loss"], whole.history["g_loss"], strict=True))
    assert found == [pytest.approx(losses, rel=1e-9) for losses in expected]
    assert whole.history["lr_generator"] == pytest.approx([0.01, 0.005])
    assert_same_on_all_ranks(whole.module)
    for cut_at in (4, whole.num_steps // 2):  # within an epoch, and at its end
        cut_off, resumed = make_gan(cut_at=cut_at), make_gan()
        cut_off.auto_save(tmp_path / str(cut_at), every_steps=cut_at - 1)
        resumed.auto_save(tmp_path / str(cut_at))
        with pytest.raises(CutOffError):
            cut_off.train(2, **options)
        resumed.train(2, **options)
        assert records(resumed) == records(whole)
        for one, other in ((resumed.module, whole.module), (resumed.ema_module, whole.ema_module)):
            assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


class Hears(Callback):
    def __init__(self):
        self.heard, self.records = [], []

    def on_train_batch_start(self, handler, batch):
        self.heard.append("start")

    def on_before_backward(self, handler, loss):
        self.heard.append("before backward")

    def on_after_backward(self, handler):
        self.heard.append("after backward")

    def on_before_optimizer_step(self, handler):
        self.heard.append("before step")

    def on_train_batch_end(self, handler, batch, loss):
        self.heard.append("end")

    def on_step_records(self, handler, records):
        self.records += records


@ranks(2)
def test_callbacks_hear_of_what_each_optimizer_does():
    handler, hears = make_gan(), Hears()
    handler.add_callback(hears)
    handler.train(1)
    backward = ["before backward", "after backward"]
    assert hears.heard == ["start", *backward, "before step", *backward, "before step", "end"] * 6
    for name in ("d_loss", "g_loss"):
        losses = [record[name] * size for record, size in zip(hears.records, [12] * 5 + [5], strict=True)]
        assert sum(losses) / 65 == pytest.approx(handler.history[name][0])
    assert all(record["grad_norm"] > 0 and record["lr_generator"] == 0.01 for record in hears.records)


@ranks(1, 2)
@pytest.mark.parametrize("returned", [None, "number", "some"])
def test_the_records_of_steps_have_what_they_return(returned, rank, world_size):
    def step(stepper, batch):
        inputs, targets = batch
        loss = mse_loss(stepper.module(inputs), targets)
        stepper.backward(loss)
        stepper.step()
        lacking = {"size": torch.tensor(float(len(inputs)) if rank == 0 else torch.nan), "never": torch.nan}
        return {None: None, "number": loss, "some": lacking}[returned]

    handler, hears = make_handler(GLOBAL_BATCH // world_size), Hears()
    handler.set_step(step)
    handler.add_callback(hears)
    handler.train(1, accumulate=2)
    own = {"epoch", "grad_norm", "lr", "samples_per_second", "step", "waiting"}
    names = {None: set(), "number": {"loss"}, "some": {"size", "never"}}[returned]
    assert [record.keys() for record in hears.records] == [own | names] * handler.num_steps
    if returned == "some":
        assert hears.records[0]["size"] == GLOBAL_BATCH // world_size
        assert math.isnan(hears.records[0]["never"])
    elif returned == "number":
        assert all(math.isfinite(record["loss"]) for record in hears.records)


@ranks(1, 3)
def test_a_loop_of_ones_own_is_made_of_the_same_parts(rank, world_size):
    torch.manual_seed(seed_of(SEED) + rank)  # rank 0's weights count
    model = Adversaries()
    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), lr=lr) for name, lr in RATES.items()}
    stepper = Stepper(model, optimizers, clip_norm=0.05, ema_decay=0.9)
    loader = distributed_loader(points(), batch_size=GLOBAL_BATCH // world_size, seed=SEED)
    expected = plain(1, 2, 0.05)[0]
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in stepper.batches(loader, accumulate=2):
        losses = torch.stack([*adversarial(stepper, batch).values()]).detach()
        sums += losses * stepper.num_own
    assert accumulated(sums) == pytest.approx([65 * loss for loss in expected], rel=1e-9)
    assert stepper.num_steps == 3
    assert_same_on_all_ranks(stepper.ema_module)
    other = Adversaries()
    others = {name: torch.optim.Adam(getattr(other, name).parameters()) for name in RATES}
    restored = Stepper(other, others, clip_norm=0.05, ema_decay=0.9)
    restored.load_state_dict(copy.deepcopy(stepper.state_dict()))
    position = loader.state_dict()
    for one in (stepper, restored):
        loader.load_state_dict(position)
        for batch in one.batches(loader):
            adversarial(one, batch)
    assert restored.num_steps == stepper.num_steps == 9
    for one, another in ((model, other), (stepper.ema_module, restored.ema_module)):
        assert all(map(torch.equal, one.state_dict().values(), another.state_dict().values()))


def accumulated(sums):
    return sum(all_gather_objects(sums)).tolist()


@ranks(1, 3)
def test_an_optimizer_that_calls_a_closure_sees_the_loss_of_all_samples():
    inputs, targets = regression().tensors
    torch.manual_seed(seed_of(SEED))
    alone = Network()
    optimizer = torch.optim.LBFGS(alone.parameters(), line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(alone(inputs), targets)
        loss.backward()
        return loss

    expected = [optimizer.step(closure).item() for _ in range(3)]
    num_calls = 0

    def step(stepper, batch):
        own_inputs, own_targets = batch

        def own_closure():
            nonlocal num_calls
            num_calls += 1
            loss = mse_loss(stepper.module(own_inputs), own_targets)
            stepper.backward(loss)
            return loss

        with torch.no_grad():
            loss = mse_loss(stepper.module(own_inputs), own_targets)
        stepper.step(closure=own_closure)
        return loss

    handler = make_handler(12)
    handler.set_optimizer(torch.optim.LBFGS, line_search_fn="strong_wolfe")
    handler.set_step(step)
    assert handler.train(3, accumulate=6)["loss"] == pytest.approx(expected, rel=1e-8)
    assert handler.num_steps == 3
    assert num_calls > 20
    assert len(set(all_gather_objects(num_calls))) == 1
    assert_same_on_all_ranks(handler.module)
    with pytest.raises(ValueError, match="clip_norm must be left out where an optimizer calls a closure"):
        handler.train(4, clip_norm=1.0)


def step_with_closure(loss_fn):
    def step(stepper, batch):
        def closure():
            loss = loss_fn(stepper.module(batch[0]), batch[1])
            stepper.backward(loss)
            return loss

        stepper.step(closure=closure)

    return step


@ranks(1, 2)
def test_a_closure_that_comes_to_a_loss_that_is_not_finite_leaves_the_weights_as_they_were(world_size):
    num_calls = 0

    def loss_fn(outputs, targets):
        nonlocal num_calls
        num_calls += 1
        is_bad = num_calls == 3 and DistributedManager().rank == world_size - 1
        return mse_loss(outputs, targets) * (float("inf") if is_bad else 1.0)

    handler = make_handler(65)
    handler.set_optimizer(torch.optim.LBFGS)
    handler.set_step(step_with_closure(loss_fn))
    before = [parameter.detach().clone() for parameter in handler.module.parameters()]
    with pytest.raises(NonFiniteLossError, match=rf"must be finite in step 0, got inf on rank {world_size - 1}"):
        handler.train(1)
    assert all(map(torch.equal, handler.module.parameters(), before))
    num_calls = 0
    handler.train(3, non_finite="skip")
    assert sum(handler.history["skipped"]) == handler.num_steps == 1
    assert not all(map(torch.equal, handler.module.parameters(), before))
    assert_same_on_all_ranks(handler.module)


class Undecided(torch.optim.SGD):
    """Computes the loss once more on rank 1."""

    def step(self, closure):
        for _ in range(1 + DistributedManager().rank):
            closure()
        super().step()


@ranks(2)
def test_ranks_that_take_other_steps_are_told_of(rank):
    handler = make_handler(8)
    handler.set_optimizer(Undecided, lr=0.1)
    handler.set_step(step_with_closure(mse_loss))
    with pytest.raises(PlanMismatchError, match=r"(?s)They bring:.*step 2 \(mod 8\).*step 1 \(mod 8\)"):
        handler.train(1)

    def takes_one_more(stepper, batch):
        numbers = adversarial(stepper, batch)
        if rank == 1:
            adversarial(stepper, batch)
        return numbers

    def takes_another(stepper, batch):
        name = ("generator", "discriminator")[rank]
        stepper.backward(loss_of_generator(stepper.module, stepper.module.generator(batch[1])), name)
        stepper.step(name)

    for function in (takes_one_more, takes_another):
        with pytest.raises(PlanMismatchError, match=r"(?s)They bring:.*(generator 0|step 1)"):
            make_gan(function=function).train(1)

    with pytest.raises(ValueError, match=r"same names in the same order on all ranks, got \['of 0'\] on rank 0 and"):
        make_gan(function=lambda *_: {f"of {rank}": 1.0}).train(1)


@ranks(2)
def test_parts_of_a_model_that_only_some_ranks_use_train_on_all(rank):
    """A parameter that no rank uses has no gradient."""

    def step(stepper, batch):
        generator = stepper.module.generator
        outputs = generator[2](generator[0](batch[1]).tanh()) if rank else generator[0](batch[1])
        stepper.backward(outputs.square().mean(), "generator")
        stepper.step("generator")

    handler = make_gan(function=step)
    before = {name: value.clone() for name, value in handler.module.state_dict().items()}
    handler.train(1)
    assert_same_on_all_ranks(handler.module)
    for name, value in handler.module.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("discriminator")


def spoilt_on_last_rank(name, at):
    """Return a step whose loss for one optimizer is NaN on the last rank, at one batch."""
    num_calls = 0

    class Spoils:
        def __init__(self, stepper):
            self.module, self.step, self._stepper = stepper.module, stepper.step, stepper

        def backward(self, loss, own_name):
            manager = DistributedManager()
            is_bad = own_name == name and num_calls == at and manager.rank == manager.world_size - 1
            self._stepper.backward(loss * float("nan") if is_bad else loss, own_name)

    def step(stepper, batch):
        nonlocal num_calls
        num_calls += 1
        return adversarial(Spoils(stepper), batch)

    return step


@ranks(1, 2)
def test_a_loss_that_is_not_finite_stops_its_optimizer_on_all_ranks(world_size):
    handler = make_gan(function=spoilt_on_last_rank("generator", 3))
    with pytest.raises(
        NonFiniteLossError, match=rf"the loss of 'generator' must be finite in step 2, got nan on rank {world_size - 1}"
    ):
        handler.train(1)
    assert handler.num_steps == 2
    handler = make_gan(function=spoilt_on_last_rank("generator", 3))
    handler.train(2, non_finite="skip")
    assert handler.history["skipped"] == [1, 0]
    assert handler.num_steps == 12  # the discriminator has taken all
    assert all(loss == loss for loss in handler.history["g_loss"])
    assert_same_on_all_ranks(handler.module)
    states = [optimizer.state_dict()["state"][0]["step"].item() for optimizer in handler.optimizers.values()]
    assert states == [12, 11]


@ranks(1, 2)
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_with_a_critic_that_steps_more_often(amp):
    def step(stepper, batch):
        for _ in range(3):
            fake = stepper.module.generator(batch[1])
            before = stepper.module.discriminator(batch[0])
            stepper.backward(loss_of_discriminator(stepper.module, batch[0], fake), "discriminator")
            is_taken = stepper.step("discriminator")
            is_same = torch.equal(before, stepper.module.discriminator(batch[0]))
            assert is_same != is_taken or stepper.num_steps  # later on the rate is low
        assert torch.is_autocast_enabled("cpu")
        assert fake.dtype == (torch.bfloat16 if amp == "bf16" else torch.float16)
        g_loss = loss_of_generator(stepper.module, stepper.module.generator(batch[1]))
        stepper.backward(g_loss, "generator")
        stepper.step("generator")
        return {"g_loss": g_loss}

    def out_of_order(stepper, batch):
        stepper.backward(stepper.module.generator(batch[1]).square().mean(), "generator")
        for _ in range(2):
            stepper.backward(stepper.module.discriminator(batch[1]).square().mean(), "discriminator")
            stepper.step("discriminator")
        stepper.step("generator")

    handler = make_gan(function=step)
    handler.module.float()
    handler.set_train_loader(TensorDataset(*(tensor.float() for tensor in points().tensors)), batch_size=8)
    handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, name="discriminator", gamma=0.5, per="step")
    handler.train(1, amp=amp)
    assert_same_on_all_ranks(handler.module)
    taken = [optimizer.state_dict()["state"][0]["step"].item() for optimizer in handler.optimizers.values()]
    num_batches = -(-65 // (8 * DistributedManager().world_size))
    assert sum(taken) + handler.history["skipped"][0] == 4 * num_batches
    assert handler.optimizers["discriminator"].param_groups[0]["lr"] == pytest.approx(0.02 * 0.5 ** taken[0])
    handler.set_step(out_of_order)
    if amp == "bf16":
        handler.train(2, amp=amp)
    else:
        with pytest.raises(DistmanError, match="'discriminator' must step once while gradients of generator wait"):
            handler.train(2, amp=amp)


@ranks(1, 2)
def test_several_optimizers_may_step_with_one_loss(world_size, tmp_path):
    def prepared(**names):
        handler = make_handler(GLOBAL_BATCH // world_size)
        for part, name in names.items():
            handler.set_optimizer(
                torch.optim.Adam,
                name=name,
                lr=0.02,
                parameters=lambda model, part=part: getattr(model, part).parameters(),
            )
        return handler

    one, two = prepared(), prepared(first="a", second="b")
    expected = one.train(3)["loss"]
    two.train(2)
    two.save(tmp_path / "saved.pt")
    resumed = prepared(first="a", second="b")
    resumed.load(tmp_path / "saved.pt")
    assert resumed.train(3)["loss"] == pytest.approx(expected, rel=1e-12)
    other = prepared(first="a", second="c")
    other.load(tmp_path / "saved.pt")
    with pytest.raises(CheckpointError, match="the names of the optimizers must be as saved, a, b, got a, c"):
        other.train(3)


def wrong_steps():
    def once(*arguments, **keywords):
        return lambda stepper, _: stepper.step(*arguments, **keywords)

    def after(loss, *names):
        return lambda stepper, batch: stepper.backward(loss(stepper, batch), *names)

    def generated(stepper, batch):
        return stepper.module.generator(batch[1]).square().mean()

    def unrelated(stepper, batch):
        stepper.backward(generated(stepper, batch), "discriminator")
        stepper.step("discriminator")

    return [
        (once(), ValueError, "name must be that of an optimizer, 'discriminator' or 'generator', got None"),
        (once("critic"), ValueError, "got 'critic'. Pass it to backward"),
        (
            once("generator"),
            DistmanError,
            r"step\(\) must follow a stepper\.backward\(\) for the same optimizer, got none for 'gen",
        ),
        (once("generator", 3), TypeError, "closure must be a function, got 3"),
        (once("generator", lambda: torch.zeros(())), DistmanError, r"closure must call backward\(\) for its optimizer"),
        (after(generated), ValueError, "name must be that of an optimizer"),
        (after(generated, "generator"), DistmanError, r"must be used by a step\(\), got one for generator that is not"),
        (after(lambda *_: 1.0, "generator"), TypeError, "the loss must be a tensor with one element, got a float"),
        (after(lambda _, batch: batch[0], "generator"), ValueError, "the loss must be one number, got shape"),
        (unrelated, ValueError, "the loss must depend on the parameters of 'discriminator'"),
        (
            lambda stepper, _: stepper.optimizers["generator"].step(),
            DistmanError,
            r"must step by step\(\) of the stepper",
        ),
        (lambda *_: {"val_loss": 1.0}, ValueError, "by names that the history does not have, got 'val_loss'"),
        (lambda *_: {"loss": torch.zeros(2)}, ValueError, "loss must be one number, got shape"),
    ]


@ranks(2)
def test_what_is_wrong_is_one_sentence():
    handler = make_gan()
    for function, error, message in wrong_steps():
        handler.set_step(function)
        with pytest.raises(error, match=message):
            handler.train(9)
    handler.set_step(adversarial)
    handler.set_val_loader(points(), batch_size=4)
    with pytest.raises(DistmanError, match="the handler has no loss function"):
        handler.train(9)
    handler.set_loss_fn(
        lambda outputs, _: outputs.mean(), forward=lambda model, batch: (model.generator(batch[1]), None)
    )
    assert "val_loss" in handler.train(9).names
    handler.set_optimizer(torch.optim.SGD, name="generator", lr=0.1)
    with pytest.raises(
        ValueError, match="a parameter must belong to one optimizer, got 4 that belong to 'discriminator' and"
    ):
        handler.train(9)
    with pytest.raises(
        ValueError, match="name must be that of an optimizer, 'discriminator' or 'generator', got 'critic'"
    ):
        handler.set_scheduler(torch.optim.lr_scheduler.StepLR, name="critic", step_size=1)
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        handler.set_optimizer(torch.optim.SGD, name=3)
    with pytest.raises(TypeError, match="function must be a function, got 'step'"):
        handler.set_step("step")
    handler = make_handler(8)
    mesh = DistributedManager().initialize_mesh((-1,), ("model",))
    handler.module.second.weight = nn.Parameter(distribute_tensor(torch.zeros(1, 8, dtype=torch.float64), mesh))
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_step(adversarial)
    with pytest.raises(TypeError, match="must train a model of which each rank has all weights"):
        handler.train(1)
    model = Network()
    stepper = Stepper(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(DistmanError, match=r"step\(\) must be called for a batch, got a call outside of one"):
        stepper.step()
    with pytest.raises(
        TypeError, match="closure must be a function, got None for LBFGS, which computes the loss several"
    ):
        [stepper.step() for _ in stepper.batches([torch.zeros(1)])]
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        next(stepper.batches([], accumulate=0))
    with pytest.raises(TypeError, match="module must be a bare module, got a DistributedDataParallel"):
        Stepper(DistributedManager().wrap_ddp(model), torch.optim.SGD(model.parameters()))
