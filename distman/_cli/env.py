"""``distman env``: what was detected, from which variables, what was passed over and why, and what will go wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from distman._cli.diagnostics import Host, diagnose
from distman._cli.output import print_text
from distman._job.meeting.secret import Protection, find_protection
from distman.environments import Detection, detect
from distman.errors import DistmanError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what initialize() would do in this process; nothing is started."
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are warnings")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 where the variables have no meaning, or there are warnings and these count."""
    try:
        detection = detect(os.environ, arguments.method)
        protection = find_protection(detection.environment, os.environ)
        told = diagnose(os.environ, detection.environment, Host())
        warnings = (*detection.warnings, *told, *protection.warnings)
    except (DistmanError, ValueError) as error:
        print(f"distman env: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        said = {"protected_by": protection.protected_by, "explanation": detection.explanation, "warnings": warnings}
        print(json.dumps({**dataclasses.asdict(detection.environment), **said}, indent=2))
    else:
        print_text(_as_text(detection, protection, warnings))
    return 1 if warnings and arguments.strict else 0


def _as_text(detection: Detection, protection: Protection, warnings: Sequence[str]) -> str:
    fields = dataclasses.asdict(detection.environment)
    width = max(map(len, fields))
    table = [f"{name:<{width}}  {'-' if value is None else value}" for name, value in fields.items()]
    reasons = [sentence for sentence in detection.explanation if sentence not in warnings]
    last = ["", *(f"warning: {warning}" for warning in warnings)] if warnings else []
    return "\n".join([*table, "", *reasons, f"The job is protected by {protection.protected_by or 'nothing'}.", *last])
