"""What a launcher says about this process, as plain values: no torch, no communication."""

from distman.environments._base import LAUNCHERS, LaunchEnvironment
from distman.environments._detect import (
    Detection,
    detect,
    explain,
    is_env_distributed,
    should_use_distributed,
)
from distman.environments._diagnostics import Host, diagnose, misspelt_variables
from distman.environments._slurm import expected_hosts

__all__ = [
    "LAUNCHERS",
    "Detection",
    "Host",
    "LaunchEnvironment",
    "detect",
    "diagnose",
    "expected_hosts",
    "explain",
    "is_env_distributed",
    "misspelt_variables",
    "should_use_distributed",
]
