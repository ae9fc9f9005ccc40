"""The parts of the package that build on collectives keep NCCL's rules: each once, forward and backward."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.mappings import copy_to_parallel_region, mark_module_as_shared, reduce_from_parallel_region
from distman.testing import ranks

from ..fft.test_transforms import check_against_one_process, make_input
from ..handler.problems import GLOBAL_BATCH, assert_same_on_all_ranks, make_handler, reference

pytestmark = pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend")


@ranks(2)
def test_each_transform_and_its_gradient(rank):
    for kind in ("fftn", "ifftn", "rfftn", "irfftn"):
        full = make_input(kind, 6, 5)
        for shard_dim, out_dim in ((0, 0), (0, 1), (1, 0)):
            check_against_one_process(kind, full, None, [0, 1], None, shard_dim=shard_dim, out_dim=out_dim, rank=rank)


@ranks(2)
def test_training_with_accumulation_and_a_checkpoint(tmp_path):
    (tmp_path,) = set(all_gather_objects(tmp_path))
    losses, weights = reference(2, accumulate=2)
    first = make_handler(GLOBAL_BATCH // 2)
    first.auto_save(tmp_path)
    first.train(1, accumulate=2)
    handler = make_handler(GLOBAL_BATCH // 2)
    handler.auto_save(tmp_path)
    history = handler.train(2, accumulate=2)
    assert history["loss"] == pytest.approx(losses, rel=1e-10)
    for own, expected in zip(handler.module.parameters(), weights, strict=True):
        torch.testing.assert_close(own.detach(), expected, rtol=1e-8, atol=1e-10)
    assert_same_on_all_ranks(handler.module)


class Split(nn.Module):
    """A layer of which each rank of a group has a part, within one that they share."""

    def __init__(self):
        super().__init__()
        self.shared, self.columns, self.rows = (nn.Linear(4, 4, bias=False) for _ in range(3))
        mark_module_as_shared(self.shared, "model")

    def forward(self, inputs):
        hidden = self.columns(copy_to_parallel_region(self.shared(inputs), "model"))
        return reduce_from_parallel_region(self.rows(hidden.relu()), "model")


class Recorded(TorchDispatchMode):
    """Writes down which collectives torch starts, and in which group."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            groups = [one for one in args if isinstance(one, torch.ScriptObject)]
            self.calls.append((function.__name__, torch.distributed.ProcessGroup.unbox(groups[0]).group_name))
        return function(*args, **(kwargs or {}))


@ranks(4)
def test_two_communicators_at_once_start_in_one_order_on_all_ranks(rank):
    """Else a GPU may run the kernel of one where its peer runs that of the other, and both wait."""
    manager = DistributedManager()
    manager.initialize_mesh([2, 2], ["data", "model"])
    model = manager.wrap_ddp(Split(), process_group=manager.group("data"), bucket_cap_mb=1e-5)
    with Recorded() as recorded:
        for _ in range(2):
            model(torch.ones(2, 4) * rank).sum().backward()
    assert len(recorded.calls) > 8
    everyone = all_gather_objects([name for name, _ in recorded.calls])
    assert everyone == everyone[:1] * 4
