import pytest
import torch

from distman.errors import DistmanError
from distman.testing import ranks

from .problems import GLOBAL_BATCH, make_handler, regression


@ranks(1, 2)
def test_schedulers_step_with_steps_or_epochs(world_size):
    for per, expected in (("step", 0.9**10), ("epoch", 0.9**2)):
        handler = make_handler(GLOBAL_BATCH // world_size, lr=0.1)
        handler.set_scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9, per=per)
        handler.train(2)
        assert handler.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * expected)
    handler.set_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e6)
    with pytest.raises(
        DistmanError, match="ReduceLROnPlateau monitors val_loss, but the handler has no data to validate with"
    ):
        handler.train(4)
    handler.set_val_loader(regression(), batch_size=8)
    handler.train(6, validate_every=2)
    assert handler.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**2 * 0.01)
    with pytest.raises(ValueError, match="per must be 'epoch' for ReduceLROnPlateau"):
        handler.set_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, per="step")
