import pytest

from distman.handler import EarlyStopping
from distman.testing import ranks

from .problems import make_handler, regression


@ranks(2)
def test_early_stopping_waits_as_long_as_it_is_told_to():
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    handler.add_callback(EarlyStopping("val_loss", patience=3, min_delta=1e9))
    assert len(handler.train(10, validate_every=2)) == 8  # the first value is the best; three more are not better
    handler.add_callback(EarlyStopping("val_los"))
    with pytest.raises(
        ValueError, match=r"monitor must be a name in the history, got 'val_los'. The history has \['epoch', "
    ):
        handler.train(10)
    handler = make_handler(8)
    handler.add_metric("constant", lambda _outputs, _targets: 1.0)
    handler.add_callback(EarlyStopping("constant", patience=2, mode="max"))
    assert len(handler.train(10)) == 3


def test_options_of_early_stopping():
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        EarlyStopping(patience=0)
    with pytest.raises(ValueError, match="mode must be one of min, max, got 'low'"):
        EarlyStopping(mode="low")
