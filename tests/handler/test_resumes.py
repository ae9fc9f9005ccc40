"""Some of the cases that ``python -m tests.handler.resumes`` tries by the hundred."""

import pytest

from distman.testing import ranks

from .resumes import check, draw

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # resumed between the two
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]


@ranks(1, 2, 3)
@pytest.mark.parametrize("number", range(4))
def test_a_training_saved_at_any_moment_is_resumed_exactly_or_its_save_refused(number, world_size, tmp_path):
    case = 100 * world_size + number
    assert check(case, tmp_path)[1] == [], draw(case)
