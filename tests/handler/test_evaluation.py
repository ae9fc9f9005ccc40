import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.errors import RankFailedError
from distman.handler import NNHandler
from distman.handler._accumulators import Accumulators
from distman.handler._objective import Outcome
from distman.testing import ranks

from .problems import Network, Normed, make_handler, regression


def classes(num_samples):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (num_samples,), generator=generator))


class Classifier(nn.Linear):
    def __init__(self):
        super().__init__(4, 3, dtype=torch.float64)


@ranks(1)
def test_metrics_may_be_on_other_devices_than_the_loss():
    metrics = {"number": lambda *_: 2.0, "host": lambda *_: torch.ones(()), "device": lambda outputs, _: outputs.mean()}
    accumulators = Accumulators(metrics)
    on_device = torch.ones(3, device="meta")
    measured = accumulators.measure(Outcome(on_device.sum(), on_device, on_device), 3)
    assert (measured.device.type, measured.dtype, measured.shape) == ("meta", torch.float64, (4,))


def make_classifier(data, batch_size=3):
    handler = NNHandler(Classifier, seed=2)
    handler.set_loss_fn(nn.functional.cross_entropy)
    handler.set_val_loader(data, batch_size=batch_size)
    handler.add_metric("accuracy", lambda outputs, targets: (outputs.argmax(1) == targets).double().mean())
    return handler


@ranks(1, 3)
@pytest.mark.parametrize("num_samples", [2, 65])
def test_figures_are_those_of_one_process(num_samples):
    data = classes(num_samples)
    handler = make_classifier(data)
    found = handler.validate()
    inputs, targets = data.tensors
    with torch.no_grad():
        outputs = handler.module(inputs)
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-12)
    assert found["accuracy"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item(), rel=1e-12)
    assert len({str(one) for one in all_gather_objects(found)}) == 1


@ranks(2)
def test_samples_are_counted_by_the_plan_whatever_a_batch_looks_like():
    data = regression()
    handler = make_handler(8)
    handler.set_loss_fn(nn.functional.mse_loss, forward=lambda model, batch: (model(batch[1]), batch[2]))
    handler.set_val_loader(data, batch_size=9, collate_fn=collate_with_a_mask)
    with torch.no_grad():
        expected = nn.functional.mse_loss(handler.module(data.tensors[0]), data.tensors[1]).item()
    assert handler.validate()["loss"] == pytest.approx(expected, rel=1e-12)


def collate_with_a_mask(samples):
    return torch.ones(3, len(samples)), *(torch.stack(column) for column in zip(*samples, strict=True))


@ranks(1, 3)
@pytest.mark.parametrize("num_samples", [0, 2, 11])
def test_predictions_are_complete_and_in_order(num_samples, rank):
    inputs = torch.arange(4.0 * num_samples, dtype=torch.float64).reshape(num_samples, 4)
    handler = make_handler(4)
    with torch.no_grad():
        expected = handler.module(inputs) if num_samples else None
    for data in (inputs, TensorDataset(inputs, torch.zeros(num_samples))):
        for all_ranks in (False, True):
            found = handler.predict(data, batch_size=2, all_ranks=all_ranks)
            if (rank and not all_ranks) or expected is None:
                assert found is None
            else:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@ranks(3)
def test_predictions_of_any_structure(rank):
    def forward(model, batch):
        outputs = model(batch[0])
        return {"value": outputs, "pair": (outputs.mean(1), [f"sample {int(one)}" for one in batch[1]])}, None

    handler = make_handler(4)
    handler.set_loss_fn(nn.functional.mse_loss, forward=forward)
    inputs = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)
    found = handler.predict(TensorDataset(inputs, torch.arange(5)), batch_size=1, num_workers=1)
    if rank == 0:
        assert found["value"].shape == (5, 1)
        assert found["pair"][0].shape == (5,)
        assert found["pair"][1] == [f"sample {number}" for number in range(5)]


@ranks(2)
def test_predictions_of_different_structure_are_an_error_on_all():
    handler = make_handler(4)
    handler.set_loss_fn(
        nn.functional.mse_loss,
        forward=lambda model, batch: ((model(batch[0]),) * (1 + DistributedManager().rank), None),
    )
    with pytest.raises((ValueError, RankFailedError), match="all batches must have the same structure"):
        handler.predict(torch.zeros(4, 4, dtype=torch.float64))


@ranks(2)
def test_an_evaluation_without_samples_has_no_figures():
    handler = make_classifier(classes(0))
    assert all(value != value for value in handler.validate().values())


@ranks(3)
def test_samples_that_keep_others_company_do_not_count_in_training():
    handler = make_classifier(classes(5))
    handler.set_optimizer(torch.optim.SGD, lr=0.0)
    handler.set_train_loader(classes(5), batch_size=1)
    handler.add_metric("seen", Seen())
    history = handler.train(1)
    assert history["seen"] == [5.0]
    assert history["loss"] == pytest.approx(history["val_loss"], rel=1e-12)
    assert history["accuracy"] == pytest.approx(history["val_accuracy"], rel=1e-12)


class Seen:
    """Counts the samples of all ranks."""

    def reset(self):
        self.num = 0

    def update(self, outputs, targets):
        self.num += len(targets)

    def compute(self):
        return sum(all_gather_objects(self.num))


@ranks(2)
def test_a_metric_without_a_value_for_a_batch_does_not_count_there(rank):
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=5)
    handler.add_metric("sometimes", lambda _outputs, _targets: float("nan") if rank else 2.0)
    handler.add_metric("never", lambda _outputs, _targets: float("nan"))
    found = handler.validate()
    assert found["sometimes"] == 2.0
    assert found["never"] != found["never"]


@ranks(2)
def test_a_loss_that_is_nan_is_not_hidden(rank):
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=5)
    handler.set_loss_fn(lambda outputs, _targets: outputs.mean() * (float("nan") if rank else 1.0))
    found = handler.validate()["loss"]
    assert found != found


@ranks(2)
def test_modes_and_gradients_are_left_as_they_were():
    handler = make_handler(8, dropout=0.5)
    handler.set_val_loader(regression(), batch_size=5)
    inputs = regression().tensors[0]
    first = handler.predict(inputs, all_ranks=True)
    assert handler.module.training
    assert not first.requires_grad
    assert torch.equal(first, handler.predict(inputs, all_ranks=True))
    handler.module.eval()
    handler.validate()
    assert not handler.module.training


@ranks(2)
def test_all_ranks_evaluate_with_the_buffers_of_rank_zero(rank):
    handler = NNHandler(Normed, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.01)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=8, drop_last=True)
    handler.train(2)
    states = all_gather_objects(handler.module.norm.state_dict())
    assert not torch.equal(states[0]["running_mean"], states[1]["running_mean"])
    found = handler.predict(regression(), all_ranks=True)
    assert torch.equal(handler.module.norm.running_mean, states[rank]["running_mean"])
    handler.module.norm.load_state_dict(states[0])
    handler.module.eval()
    with torch.no_grad():
        expected = handler.module(regression().tensors[0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@ranks(2)
def test_a_loader_of_ones_own_is_taken_as_it_is(rank):
    inputs, targets = regression().tensors
    mine = TensorDataset(inputs[rank::2], targets[rank::2])
    handler = make_handler(8)
    handler.set_val_loader(DataLoader(mine, batch_size=4))
    with torch.no_grad():
        outputs = handler.module(inputs)
    expected = nn.functional.mse_loss(outputs, targets).item()
    assert handler.validate()["loss"] == pytest.approx(expected, rel=1e-12)
    predicted = handler.predict(DataLoader(mine, batch_size=4), all_ranks=True)
    torch.testing.assert_close(predicted, torch.cat([outputs[0::2], outputs[1::2]]), rtol=1e-12, atol=0)


@ranks(1, 3)
def test_other_data_than_those_of_the_training_are_evaluated(rank):
    handler = make_handler(8)
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
    inputs, targets = regression().tensors
    with torch.no_grad():
        errors = handler.module(inputs) - targets
    before = torch.get_rng_state()
    for data, options in [
        (TensorDataset(inputs, targets), {}),
        (TensorDataset(inputs, targets), {"batch_size": 3}),
        ([*zip(inputs, targets, strict=True)], {"batch_size": 7}),
        (Once([(inputs, targets)] if rank == 0 else []), {}),
    ]:
        found = handler.evaluate(data, **options)
        expected = {"loss": errors.square().mean().item(), "error": errors.abs().mean().item()}
        assert found == pytest.approx(expected, rel=1e-12)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(handler.history) == 0
    assert not handler.validates


class Once:
    """Batches that each rank makes in its own way."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@ranks(1)
@pytest.mark.parametrize(
    ("data", "options", "complaint"),
    [
        (iter([]), {}, "data must be re-iterable"),
        ([], {}, "data must not be a list without batch_size"),
        (Once([]), {"batch_size": 3}, r"loader options must be passed with a dataset, got \['batch_size'\]"),
        (TensorDataset(torch.ones(3, 4)), {"shuffle": True}, "shuffle must be left out for evaluation"),
        (TensorDataset(torch.ones(3, 4)), {"batchsize": 3}, "batchsize must be an option .* Did you mean batch_size"),
    ],
)
def test_data_that_cannot_be_evaluated_are_refused(data, options, complaint):
    for method in (make_handler(8).evaluate, make_handler(8).predict):
        with pytest.raises(TypeError, match=complaint):
            method(data, **options)


@ranks(1)
def test_names_and_shapes_of_metrics():
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs())
    with pytest.raises(ValueError, match="name must be a new one, got 'error'"):
        handler.add_metric("error", nn.functional.mse_loss)
    for taken in ("loss", "epoch", "lr", "val_f1"):
        with pytest.raises(ValueError, match=f"name must be a new one, got '{taken}'"):
            handler.add_metric(taken, nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"metric error must be one number, got shape \(8, 1\). Return its mean"):
        handler.validate()
    handler.clear_metrics()
    assert list(handler.validate()) == ["loss"]
    assert isinstance(handler.module, Network)


@ranks(2)
def test_metrics_of_torchmetrics_are_those_of_one_process_also_with_ranks_without_samples():
    from torchmetrics import MetricCollection  # here, since it takes each worker seconds
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    warnings.simplefilter("ignore", UserWarning)  # of so few samples
    metrics = {"auroc": MulticlassAUROC(num_classes=3), "accuracy": MulticlassAccuracy(num_classes=3)}
    for num_samples in (1, 2, 10):
        data = classes(num_samples)
        handler = make_classifier(data)
        handler.add_metric("of", MetricCollection({name: metric.clone() for name, metric in metrics.items()}))
        handler.add_metric("alone", metrics["accuracy"].clone())
        with torch.no_grad():
            outputs = handler.module(data.tensors[0])
        found = [handler.validate() for _ in range(2)]
        for name, metric in metrics.items():
            single = metric.clone()
            single.sync_on_compute = False
            single.update(outputs, data.tensors[1])
            expected = pytest.approx(single.compute().item(), rel=1e-6, nan_ok=True)
            assert [one[f"of_{name}"] for one in found] == [expected] * 2
        assert [one["alone"] for one in found] == [one["of_accuracy"] for one in found]
