"""torchrun on this machine."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..ports import find_free_port
from .processes import Finished, Running, launch, start


@dataclass(frozen=True)
class Torchrun:
    """Every ``run`` runs ``torchrun --master-port=PORT OPTIONS SCRIPT ARGUMENTS`` on some ranks: a static rendezvous.

    Attributes:
        python: The interpreter of torchrun; `preloaded.PYTHON` is that of its ranks, too.
    """

    python: str | Path = sys.executable

    def run(
        self,
        *script: str | Path,
        ranks: int,
        options: tuple[str, ...] = (),
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60.0,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a script (or, with the option ``--no-python``, a program) to its end."""
        __tracebackhide__ = True
        return launch(self.command(*script, ranks=ranks, options=options), env=env, timeout=timeout, cwd=cwd)

    def start(
        self,
        *script: str | Path,
        ranks: int,
        options: tuple[str, ...] = (),
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> AbstractContextManager[Running]:
        """Do what `run` does for the length of a ``with`` block."""
        return start(self.command(*script, ranks=ranks, options=options), env=env, cwd=cwd)

    def command(self, *script: str | Path, ranks: int, options: tuple[str, ...] = ()) -> list[str | Path]:
        """Return the command line."""
        torchrun = [self.python, "-m", "torch.distributed.run", f"--master-port={find_free_port()}"]
        return [*torchrun, f"--nproc_per_node={ranks}", *options, *script]
