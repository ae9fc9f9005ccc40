"""What a launcher says about this process, as plain values: no torch, no communication."""

from distman.environments._base import LaunchEnvironment
from distman.environments._detect import (
    Detection,
    detect,
    explain,
    is_env_distributed,
    should_use_distributed,
)
from distman.environments._launcher import Agent, Allocation, Family, Launcher, OnFailure, Place
from distman.environments._registry import LAUNCHERS, register_launcher
from distman.environments._spelling import misspelt_variables

__all__ = [
    "LAUNCHERS",
    "Agent",
    "Allocation",
    "Detection",
    "Family",
    "LaunchEnvironment",
    "Launcher",
    "OnFailure",
    "Place",
    "detect",
    "explain",
    "is_env_distributed",
    "misspelt_variables",
    "register_launcher",
    "should_use_distributed",
]
