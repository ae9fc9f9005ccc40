"""Run ``distman check`` with a collective that goes wrong on rank 1: ``check_with_fault.py wrong|raise OPTIONS``."""

import os
import sys

from distman import cli, collectives

gather = collectives.all_gather_v


def all_gather_v(tensor, *arguments, **options):
    if os.environ["RANK"] != "1":
        return gather(tensor, *arguments, **options)
    if sys.argv[1] == "raise":
        raise ValueError("boom")
    return gather(tensor, *arguments, **options) + 1


collectives.all_gather_v = all_gather_v
sys.exit(cli.main(["check", *sys.argv[2:]]))
