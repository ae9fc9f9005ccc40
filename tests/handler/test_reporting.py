import io
import logging
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest

from distman import DistributedManager
from distman.handler._reporting import training_logger
from distman.testing import ranks

from .problems import make_handler


@ranks(2)
@pytest.mark.parametrize("mode", ["console", "file", "both", None])
def test_rank_zero_writes_a_line_for_each_epoch(mode, rank, tmp_path):
    path = tmp_path / "logs" / "training.log"
    with redirect_stdout(io.StringIO()) as shown:
        handler = make_handler(8, logger_mode=mode, log_file=path)
        handler.train(2)
    DistributedManager().barrier()
    lines = re.compile(r"epoch [12]/2: loss \d+\.\d+, lr 0\.02, seconds \S+\n")
    assert len(lines.findall(shown.getvalue())) == (2 if rank == 0 and mode in ("console", "both") else 0)
    if mode in ("file", "both"):
        assert len(lines.findall(path.read_text())) == 2
        assert re.match(r"\d{4}-\d\d-\d\d ", path.read_text())
    else:
        assert not path.exists()
    for own in list(training_logger.handlers):
        training_logger.removeHandler(own)
        own.close()
    training_logger.propagate = True
    training_logger.setLevel(logging.NOTSET)


@ranks(2)
def test_rank_zero_shows_a_bar(rank):
    handler = make_handler(8)
    with redirect_stderr(io.StringIO()) as shown:
        handler.train(2, progress=True)
    assert ("epoch 2/2" in shown.getvalue() and "/5" in shown.getvalue()) == (rank == 0)
    with redirect_stderr(io.StringIO()) as shown:
        handler.train(3, progress=False)
        handler.train(4)
    assert shown.getvalue() == ""
