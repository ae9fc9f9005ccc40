"""Does the suite find mistakes? Forty small ones, each in a copy of the repository, and the tests that ought to fail.

``python -m tests.mutants`` tries all of them, one after another; the exit code is 1 if the tests pass over one.
A mutant whose text is gone, or stands there more than once, is an error: choose another line.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LIMIT = 300  # seconds for the tests of a mutant, which may well hang
FIRST_FAILURE = 1  # the exit code of pytest when tests failed; others mean that they did not run


@dataclass(frozen=True)
class Mutant:
    """A mistake in one line.

    Attributes:
        file: Where, below ``distman/``.
        old: A part of the line, of which the file has one.
        new: What stands there instead.
        tests: What ought to fail, below ``tests/``.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.old}  ->  {self.new}"

    def text(self, repository: Path) -> str:
        """Return the text of the file with the mistake."""
        text = (repository / "distman" / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            msg = f"{self.file} must have the mutant's text once, got it {text.count(self.old)} times: {self.old}"
            raise LookupError(msg)
        return text.replace(self.old, self.new)


def _mutants(file: str, tests: str, *changes: tuple[str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(file, old, new, tuple(tests.split())) for old, new in changes)


MUTANTS = (
    *_mutants(
        "environments/_hostlist.py",
        "environments/test_hostlist.py",
        ("math.prod(map(len, brackets))", "sum(map(len, brackets))"),
        ("range(low, high + 1)]", "range(low, high)]"),
        ("(*reversed(leading), fastest)", "(*leading, fastest)"),
        ("0 <= high - low < MAX_RANGE", "0 <= high - low <= MAX_RANGE"),
    ),
    *_mutants(
        "_job/meeting/address.py",
        "job/meeting/test_address.py",
        ('_FIRST_PORT + int.from_bytes(digest[:4], "big")', 'int.from_bytes(digest[:4], "big")'),
        ("environment.num_nodes > 1", "environment.num_nodes > 2"),
    ),
    *_mutants(
        "_job/meeting/peers.py",
        "job/meeting/test_peers.py job/meeting/test_membership.py",
        ("if len(claims) > 1", "if len(claims) > 2"),
        ("max(len(node), said[place] + 1)", "len(node)"),
        ("if len(sharing) > 1 and any(", "if len(sharing) > 1 and all("),
    ),
    *_mutants(
        "_coordination/sync.py",
        "coordination/test_sync.py",
        ("if place == 0 and page > 0:", "if place == 0 and page > 1:"),
        (
            "range((page - 1) * _KEYS_PER_PAGE, page * _KEYS_PER_PAGE)",
            "range((page - 1) * _KEYS_PER_PAGE, page * _KEYS_PER_PAGE - 1)",
        ),
    ),
    *_mutants(
        "_coordination/preemption.py",
        "coordination/test_preemption.py",
        ("if furthest is not None and step <= furthest:", "if furthest is not None and step < furthest:"),
        ("if other != step:", "if other > step:"),
    ),
    *_mutants(
        "_coordination/consensus.py",
        "coordination/test_barrier.py",
        ("count(store, protocol.passages(self.key), _GIVEN_UP)", "count(store, protocol.passages(self.key), 0)"),
    ),
    *_mutants(
        "_coordination/consensus.py",
        "job/groups/test_registry.py",
        ("if first.digest != digest:", "if first.digest == digest:"),
    ),
    *_mutants(
        "_job/manager/group_methods.py",
        "job/groups/test_registry.py",
        ("inner.orthogonal(outer)", "inner.orthogonal()"),
    ),
    *_mutants(
        "collectives/_transport/_backend.py",
        "collectives/test_reduce_scatter.py collectives/test_all_gather.py collectives/test_all_to_all.py",
        ("piece.resolve_conj().resolve_neg().contiguous()", "piece.resolve_neg().contiguous()"),
    ),
    *_mutants(
        "collectives/_sums.py",
        "collectives/test_reduce_scatter.py collectives/test_all_gather.py",
        ("torch.add(self._own.to(self._dtype), piece, out=", "torch.sub(self._own.to(self._dtype), piece, out="),
        ("return total.to(self._own.dtype)", "return total"),
    ),
    *_mutants("collectives/_gather.py", "collectives/test_scatter.py", ("if needs_grad:", "if not needs_grad:")),
    *_mutants(
        "collectives/_all_reduce.py",
        "test_mappings.py",
        ("if use_fp32 and dtype in HALVES:", "if not use_fp32 and dtype in HALVES:"),
    ),
    *_mutants(
        "fft/_blocks.py",
        "fft/test_blocks.py fft/test_transforms.py",
        ("half.narrow(dim, 1, (length - 1) // 2)", "half.narrow(dim, 1, length // 2)"),
        ("if num_blocks > 1:", "if num_blocks < 1:"),
    ),
    *_mutants(
        "fft/_hermitian.py",
        "fft/test_transforms.py",
        ("(end - high if piece.is_image", "(low - piece.start if piece.is_image"),
        ("images[::-1]", "images"),
    ),
    *_mutants(
        "fft/_plan.py",
        "fft/test_transforms.py",
        ("[0, length // 2] if length % 2 == 0 else [0]", "[0, length // 2] if length % 2 == 1 else [0]"),
    ),
    *_mutants(
        "data/_batches.py",
        "data/test_batches.py data/test_loaders.py",
        ("(self._rank < num_total % self.num_ranks)", "(self._rank <= num_total % self.num_ranks)"),
        ("-(-self.end // self.stride)", "self.end // self.stride"),
        ("position + step * self.stride, self._rank", "position, self._rank"),
    ),
    *_mutants(
        "checkpoint/_folder.py",
        "checkpoint/test_folder.py",
        ("sorted(self._complete())[: -self._keep]", "sorted(self._complete())[: -self._keep - 1]"),
        ("max(found.values(), key=lambda one: one.step)", "min(found.values(), key=lambda one: one.step)"),
    ),
    *_mutants(
        "handler/_accumulators.py",
        "handler/test_evaluation.py handler/test_training.py",
        ("counts = ~values.isnan()", "counts = values.isnan()"),
        ("self.sums[0].add_(values, alpha=num_samples)", "self.sums[0].add_(values)"),
    ),
    *_mutants(
        "training/_engine.py",
        "handler/test_optimization.py handler/test_training.py handler/test_resumption.py",
        ("share * self._world_size if self._wraps", "share if self._wraps"),
        ("index == len(steps)", "index == 1"),
        ("self.num_skipped += self.num_left_out", "self.num_skipped -= self.num_left_out"),
    ),
    *_mutants(
        "executor/_moving.py",
        "executor/test_moving.py",
        ('part.device.type != "cpu" or part.requires_grad', 'part.device.type != "cpu"'),
    ),
    *_mutants("_cli/output.py", "cli", ("if abs(number) >= size)", "if abs(number) > size)")),
    *_mutants(
        "_cli/timing.py",
        "cli/test_bench.py cli/test_check.py",
        ("-(-num_bytes // step) * step", "num_bytes // step * step"),
    ),
)


def is_killed(mutant: Mutant) -> bool:
    """Return whether a test fails in a copy that has the mistake."""
    with tempfile.TemporaryDirectory(prefix="distman-mutant-") as folder:
        copy = Path(folder)
        for name in ("distman", "tests", "docs"):
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        for name in ("pyproject.toml", "setup.cfg", "README.md", "CHANGELOG.md"):
            shutil.copy(REPOSITORY / name, copy / name)
        (copy / "distman" / mutant.file).write_text(mutant.text(copy), encoding="utf-8")
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        try:
            done = subprocess.run(
                [*pytest, *(f"tests/{test}" for test in mutant.tests)],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, FIRST_FAILURE):
            msg = f"the tests of {mutant} must run, got exit code {done.returncode}.\n{done.stdout}{done.stderr}"
            raise RuntimeError(msg)
        return done.returncode == FIRST_FAILURE


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants; return whether one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.add_argument("--only", type=int, metavar="N", action="append", help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    numbers = options.only or range(1, len(MUTANTS) + 1)
    survivors = 0
    for number in numbers:
        mutant = MUTANTS[number - 1]
        killed = options.list or is_killed(mutant)
        survivors += not killed
        verdict = "" if options.list else "killed    " if killed else "SURVIVED  "
        sys.stdout.write(f"{number:3d}  {verdict}{mutant}\n")
        sys.stdout.flush()
    if not options.list:
        sys.stdout.write(f"{len(numbers) - survivors} of {len(numbers)} killed\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
