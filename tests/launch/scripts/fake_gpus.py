"""Print the device of this rank, as if CUDA saw what CUDA_VISIBLE_DEVICES names."""

import os
import sys

import torch

from distman import environments, pick_device

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
environment = environments.detect(os.environ).environment
device = pick_device(environment.local_rank, environment.local_world_size)
sys.stdout.write(f"{environment.rank} {device}\n")
