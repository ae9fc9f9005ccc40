"""Commands, run in this process, which has imported what they need."""

import contextlib
import io
import os
import subprocess
from unittest import mock

from distman._cli import main


def run(*arguments, environ=None):
    """Return how a command ends that runs with these variables alone; None is those of this process."""
    with contextlib.ExitStack() as stack:
        if environ is not None:
            stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "10000", **environ}, clear=True))
        output = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
