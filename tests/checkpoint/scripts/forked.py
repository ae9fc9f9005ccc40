"""Both experiments with forked children, for one import of torch.

Arguments: a folder, and how many to kill in each way of saving.
"""

import sys
from pathlib import Path

import ended
import killed
import torch

torch.set_num_threads(1)
if ended.main(Path(sys.argv[1]) / "ended"):
    killed.main(Path(sys.argv[1]) / "killed", int(sys.argv[2]))
