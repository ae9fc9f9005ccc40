"""What a launcher says about this process, as plain values: no torch, no communication."""

# What is imported as itself is for other parts of the package.
from distman.environments._base import (
    LaunchEnvironment,
    read_flag as read_flag,
    read_host as read_host,
    read_text as read_text,
)
from distman.environments._detect import (
    METHOD as METHOD,
    Detection,
    detect,
    explain,
    is_env_distributed,
    misspelt_variables,
    should_use_distributed,
    spoken as spoken,
)
from distman.environments._hostlist import first_host as first_host, parse_hostlist as parse_hostlist
from distman.environments._launcher import (
    Agent,
    Allocation,
    Family,
    Launcher,
    OnFailure,
    Place,
    fake_variables as fake_variables,
    sets as sets,
)
from distman.environments._launchers import BARE as BARE, DISTMAN_RUN as DISTMAN_RUN
from distman.environments._registry import LAUNCHERS, register_launcher

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
