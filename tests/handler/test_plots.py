from pathlib import Path

import pytest
from matplotlib.image import imread

from distman.errors import RankFailedError
from distman.testing import ranks

from .problems import make_handler, regression


@ranks(1, 2)
def test_pictures_are_drawn_on_rank_zero(tmp_path):
    handler = make_handler(8)
    handler.set_val_loader(regression(), batch_size=8)
    handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
    handler.train(3, validate_every=2)
    handler.plot_losses(tmp_path / "plots" / "losses.png", log=True)
    handler.plot_metrics(tmp_path / "plots" / "metrics.png")
    handler.plot_metrics(tmp_path / "rates.svg", ["lr"])
    for name in ("losses", "metrics"):
        picture = imread(tmp_path / "plots" / f"{name}.png")
        assert picture.shape[:2] == (600, 960)
        assert 0.5 < picture.mean() < 0.999
    assert "<svg" in (tmp_path / "rates.svg").read_text()
    with pytest.raises((ValueError, RankFailedError), match=r"names must be in the history, got \['no'\]"):
        handler.plot_metrics(tmp_path / "no.png", ["no"])
    assert not Path(tmp_path / "no.png").exists()
