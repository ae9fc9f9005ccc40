"""What a launcher says about this process, as plain values: no torch, no communication."""

from distman.environments.base import LAUNCHERS, LaunchEnvironment
from distman.environments.detect import (
    Detection,
    detect,
    explain,
    is_env_distributed,
    should_use_distributed,
)
from distman.environments.foresight import Host, foresee, misspelt_variables
from distman.environments.slurm import expected_hosts

__all__ = [
    "LAUNCHERS",
    "Detection",
    "Host",
    "LaunchEnvironment",
    "detect",
    "expected_hosts",
    "explain",
    "foresee",
    "is_env_distributed",
    "misspelt_variables",
    "should_use_distributed",
]
