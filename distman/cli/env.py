"""``distman env``: what was detected, from which variables, what was passed over and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from distman.environments import Detection, detect
from distman.errors import LaunchEnvironmentError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser.

    Local.
    """
    parser = subparsers.add_parser(
        "env",
        help="show what was detected, from which variables, and why",
        description="Show what initialize() would do in this process; nothing is started.",
    )
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Local.

    Returns:
        The exit code: 0, or 1 where the variables have no meaning.
    """
    try:
        detection = detect(os.environ, arguments.method)
    except (LaunchEnvironmentError, ValueError) as error:
        print(f"distman env: {error}", file=sys.stderr)
        return 1
    print(_as_json(detection) if arguments.json else _as_text(detection))
    return 0


def _as_json(detection: Detection) -> str:
    return json.dumps({**dataclasses.asdict(detection.environment), "explanation": detection.explanation}, indent=2)


def _as_text(detection: Detection) -> str:
    fields = dataclasses.asdict(detection.environment)
    width = max(map(len, fields))
    table = [f"{name:<{width}}  {'-' if value is None else value}" for name, value in fields.items()]
    return "\n".join([*table, "", *detection.explanation])
