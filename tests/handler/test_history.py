import math

import pytest

from distman.handler import History


def test_history():
    history = History()
    assert repr(history) == "History(0 epochs: nothing yet)"
    assert (len(history), history.names, history["loss"], history.best("loss")) == (0, [], [], None)
    history.add({"epoch": 0.0, "loss": 2.0})
    history.add({"epoch": 1.0, "loss": 1.0, "f1": 0.5})
    history.add({"epoch": 2.0, "loss": math.nan, "f1": 0.5})
    assert history.best("loss") == 1
    assert history.best("f1", mode="max") == 1
    assert history.best("no") is None
    with pytest.raises(ValueError, match="mode must be one of min, max, got 'Min'"):
        history.best("loss", mode="Min")
    assert history.names == ["epoch", "loss", "f1"]
    assert repr(history) == "History(3 epochs: epoch, loss, f1)"
    again = History()
    again.load_state_dict(history.state_dict())
    assert [*again][:2] == [*history][:2]
