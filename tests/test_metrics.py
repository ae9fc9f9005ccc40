import pytest
import torch

from distman import DistributedManager
from distman.errors import PlanMismatchError
from distman.metrics import aggregate_loss, aggregate_metrics, reduce_loss
from distman.testing import ranks

NAN, INF = float("nan"), float("inf")


@ranks(1, 2, 3)
def test_mean_and_sum_in_double_precision(rank, world_size):
    losses = [0.1 * (one + 1) for one in range(world_size)]
    dst = world_size - 1
    mean, total = (
        reduce_loss(losses[rank], dst),
        reduce_loss(torch.tensor(losses[rank], dtype=torch.float64), dst, mean=False),
    )
    if rank == dst:
        assert mean == pytest.approx(sum(losses) / world_size, rel=1e-15)
        assert total == pytest.approx(sum(losses), rel=1e-15)
    else:
        assert (mean, total) == (None, None)


@ranks(2)
def test_a_rank_that_is_none():
    with pytest.raises(ValueError, match="dst_rank must be a rank in group 'world', 0 to 1, got 2"):
        reduce_loss(1.0, 2)


@ranks(4)
def test_over_a_group(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    assert reduce_loss(rank, 1, group="pairs") == (rank - 0.5 if rank % 2 else None)


@ranks(1, 2, 4)
def test_metrics_of_uneven_shares_are_those_of_one_process(rank, world_size):
    samples = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = samples[rank::world_size]
    found = aggregate_metrics({"mean": mine.mean(), "square": mine.square().mean().item()}, weight=len(mine))
    assert list(found) == ["mean", "square"]
    assert found["mean"] == pytest.approx(samples.mean().item(), rel=1e-12)
    assert found["square"] == pytest.approx(samples.square().mean().item(), rel=1e-12)
    assert aggregate_loss(mine.mean(), weight=len(mine)) == pytest.approx(samples.mean().item(), rel=1e-12)


@ranks(3)
def test_without_weights_all_ranks_count_the_same_in_any_order_of_names(rank):
    metrics = {"loss": float(rank), "accuracy": 2.0 * rank}
    if rank == 1:
        metrics = dict(reversed(metrics.items()))
    found = aggregate_metrics(metrics)
    assert found == {"loss": 1.0, "accuracy": 2.0}
    assert list(found) == list(metrics)


@ranks(3)
def test_a_rank_without_samples_or_with_nan_does_not_count(rank):
    loss = [1.0, NAN, 4.0][rank]
    assert aggregate_loss(loss, weight=[1, 7, 2][rank]) == pytest.approx(3.0, rel=1e-15)
    assert aggregate_loss([1.0, INF, 4.0][rank], weight=[1, 0, 2][rank]) == pytest.approx(3.0, rel=1e-15)
    nowhere = aggregate_metrics({"a": NAN, "b": 1.0, "c": [INF, 1.0, 1.0][rank]})
    assert nowhere["a"] != nowhere["a"]
    assert (nowhere["b"], nowhere["c"]) == (1.0, INF)
    nobody = aggregate_loss(1.0, weight=0)
    assert nobody != nobody


@ranks(3)
def test_different_names_raise_on_all_and_are_told(rank):
    metrics = {"loss": 1.0} | ({"f1": 0.5} if rank == 1 else {})
    with pytest.raises(PlanMismatchError, match=r"rank 0: .* of 1 tensors\n.*rank 1: .* of 2 tensors, among them f1 "):
        aggregate_metrics(metrics)
    assert aggregate_metrics({"loss": 1.0}) == {"loss": 1.0}


@ranks(2)
def test_many_metrics_and_none(rank):
    many = {f"metric {number}": float(number + rank) for number in range(400)}
    assert aggregate_metrics(many) == {f"metric {number}": number + 0.5 for number in range(400)}
    assert aggregate_metrics({}) == {}


@ranks(2)
def test_what_is_no_number_is_one_sentence():
    with pytest.raises(ValueError, match=r"accuracy must be one number, got a tensor of shape \(2,\)"):
        aggregate_metrics({"accuracy": torch.ones(2)})
    with pytest.raises(ValueError, match=r"weight must be a number of 0 or more, got -1\.0"):
        aggregate_loss(1.0, weight=-1)


@ranks(4)
def test_metrics_over_a_group(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    assert aggregate_metrics({"loss": float(rank)}, group="pairs") == {"loss": 0.5 + 2 * (rank // 2)}


class Mean:
    """As torchmetrics' own: it adds up over the ranks by itself."""

    def __init__(self):
        self.total = torch.zeros(2)

    def update(self, values):
        self.total += torch.tensor([values.sum(), len(values)])

    def compute(self):
        total = self.total.clone()
        torch.distributed.all_reduce(total)
        return total[0] / total[1]


@ranks(2)
def test_metrics_that_keep_a_state_are_computed_over_all_ranks(rank):
    mean = Mean()
    mean.update(torch.arange(3.0 * rank + 1))
    expected = torch.cat([torch.arange(1.0), torch.arange(4.0)]).mean().item()
    found = aggregate_metrics({"mean": mean, "loss": float(rank)})
    assert found == {"mean": pytest.approx(expected), "loss": 0.5}
