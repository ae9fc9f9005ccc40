"""Everything that needs GPUs, in one report to attach to a bug or a pull request: ``make gpu``.

    python3 -m tests.gpu_report              # writes gpu-report.md, in less than 10 minutes
    python -m tests.gpu_report --on-cpu      # the same over gloo without a GPU, to try the report itself

It needs torch, pytest and cloudpickle, in any Python; the package need not be installed. The most telling part comes
first, and the report is written after each. The exit code is 0 if all went well, 1 if a part did not, and 2 where there
is no GPU or one of the three is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distman._version import VERSION
from tests.ports import find_free_port

REPOSITORY = Path(__file__).parents[1]
MAX_RANKS = 8
NEEDED = ("torch", "pytest", "cloudpickle")
TESTS = (
    "tests/launch/test_gpus.py",
    "tests/launch/test_collectives.py",
    "tests/test_decorators.py",
    "tests/test_synchronizations.py",
)
"""Files with tests that need a GPU: to collect all others would need all that they need."""
RANKS_ON_CPU = 2
SHOWN = 20_000
"""Characters of a part's output that the report shows, its end: the traceback of a failed test is there."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the report: what this Python is to run, within how many seconds."""

    title: str
    command: Sequence[str]
    limit: float
    is_markdown: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """How a part ended; the exit code is None if its time was over."""

    part: Part
    exit_code: int | None
    seconds: float
    output: str


def parts(num_ranks: int, rounds: int) -> list[Part]:
    """Return what is run; the limits add up to less than 10 minutes. The fault cases are among the tests."""
    ranks = ["-m", "torch.distributed.run", f"--master-port={find_free_port()}", f"--nproc-per-node={num_ranks}"]
    is_installed = importlib.metadata.entry_points(group="pytest11", name="distman")
    kit = [] if is_installed else ["-p", "distman.testing._plugin"]
    tests = ["-m", "pytest", *kit, "-m", "gpu", "-v", "-rs", "-p", "no:cacheprovider", "--color=no", *TESTS]
    benchmarks = [*ranks, "docs/benchmarks/gpus.py", "--rounds", str(rounds)]
    return [
        Part("distman check", [*ranks, "-m", "distman", "check"], 150),
        Part("Tests that need a GPU", tests, 250),
        Part("Benchmarks", benchmarks, 180, is_markdown=True),
    ]


def run(part: Part, environ: dict[str, str]) -> Result:
    """Run a part; at the end of its time it is interrupted, and then killed."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=REPOSITORY,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=part.limit)
        exit_code = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            output = "It had to be killed."
        exit_code = None
    return Result(part, exit_code, time.monotonic() - started, output)


def report(results: Sequence[Result], machine: Sequence[tuple[str, str]]) -> str:
    """Return the report, in Markdown."""
    lines = ["# distman on GPUs", "", "| what | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in machine]
    lines += ["", "| part | result | time |", "| --- | --- | --- |"]
    lines += [f"| {one.part.title} | {verdict(one)} | {one.seconds:.0f} s |" for one in results]
    for one in results:
        output = one.output[-SHOWN:].strip()
        command = f"`python {' '.join(one.part.command)}`"
        is_markdown = one.part.is_markdown and one.exit_code == 0
        lines += ["", f"## {one.part.title}", "", command, "", output if is_markdown else f"```text\n{output}\n```"]
    return "\n".join(lines) + "\n"


def verdict(result: Result) -> str:
    """Return how a part ended, in words."""
    if result.exit_code is None:
        return f"FAILED: not done after {result.part.limit:.0f} s"
    return "went well" if result.exit_code == 0 else f"FAILED with exit code {result.exit_code}"


def machine() -> list[tuple[str, str]]:
    """Return what the figures depend on."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else "none"
    return [
        ("GPUs", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"),
        ("driver", said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]),
        ("CUDA, ROCm, NCCL", f"{torch.version.cuda or 'none'}, {torch.version.hip or 'none'}, {nccl}"),
        ("torch", torch.__version__),
        ("distman", f"{VERSION}, commit {said_by('git', 'describe', '--always', '--dirty')}"),
        ("Python, system", f"{platform.python_version()}, {platform.platform()}"),
        ("CPUs", str(len(os.sched_getaffinity(0)))),
    ]


def said_by(*command: str) -> str:
    """Return what a command says, or that it cannot."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"unknown ({command[0]} does not say)"
    return done.stdout.strip()


def why_there_is_no_gpu() -> str:
    """Return why torch sees none, and what to do."""
    import torch

    if not torch.cuda.is_available() and torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} was built for CPUs only. On a machine with a GPU install one for it, as "
            "https://pytorch.org/get-started says, into .venv."
        )
    hidden = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in os.environ]
    remedy = f"Unset {' and '.join(hidden)}" if hidden else "Look what nvidia-smi or rocm-smi says of the driver"
    return f"{remedy}, or run this on a machine with a GPU."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and write the report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"), help="%(default)s if left out")
    parser.add_argument("--on-cpu", action="store_true", help="try the report without a GPU")
    chosen = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"{sys.executable} must have {', '.join(missing)}, got none. Install it, or use another Python.\n"
        )
        return 2
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus and not chosen.on_cpu:
        sys.stderr.write(f"There is no GPU here: torch sees none. {why_there_is_no_gpu()}\n")
        return 2
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])  # not installed, maybe
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | (
        {"CUDA_VISIBLE_DEVICES": ""} if chosen.on_cpu else {}
    )
    results = []
    for part in parts(RANKS_ON_CPU, 1) if chosen.on_cpu else parts(min(num_gpus, MAX_RANKS), 30):
        sys.stdout.write(f"{part.title} ... ")
        sys.stdout.flush()
        results.append(run(part, environ))
        sys.stdout.write(f"{verdict(results[-1])}, {results[-1].seconds:.0f} s\n")
        chosen.output.write_text(report(results, machine()), encoding="utf-8")  # what is done stays if this is ended
    sys.stdout.write(f"written into {chosen.output}\n")
    return int(any(result.exit_code != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
