"""Some of the cases that ``python -m tests.handler.resumes`` tries by the hundred."""

import pytest

from distman.testing import ranks

from .resumes import check, draw

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # resumed between the two
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]


CASES = {1: [100, 101, 103, 135], 2: [200, 201, 202, 203], 3: [301, 302, 303]}
"""By the number of ranks. Workers that persist are in one of one rank: each training starts them anew on each rank."""


@ranks(1, 2, 3)
@pytest.mark.parametrize("index", range(4))
def test_a_training_saved_at_any_moment_is_resumed_exactly_or_its_save_refused(index, world_size, tmp_path):
    for case in CASES[world_size][index : index + 1]:
        assert check(case, tmp_path)[1] == [], draw(case)
