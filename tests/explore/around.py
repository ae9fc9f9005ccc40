"""The code in which the survivors of a case are when another rank fails: what programs do around their work.

A function gets the steps of the work, in each of which a failure may arrive, and calls them in its own way.
"""

import asyncio
import atexit
import csv
import gzip
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import h5py
import torch
from torch.utils.data import DataLoader, Dataset

Steps = Iterable[Callable[[], object]]

log = logging.getLogger("program")


def plain(steps: Steps) -> None:
    for step in steps:
        step()


def with_cleanup(steps: Steps) -> None:
    """Leave the job in any case, as programs do."""
    from distman import DistributedManager

    try:
        plain(steps)
    finally:
        DistributedManager.cleanup()


def retry(steps: Steps) -> None:
    """One item that fails must not spoil the others."""
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - as programs do
            log.warning("left out: %r", error)


def bare(steps: Steps) -> None:
    for step in steps:
        with suppress(BaseException):
            step()


class Lazy:
    """It works while it is written into the log, which catches what is raised there."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step

    def __str__(self) -> str:
        self.step()
        return "done"


def in_logging(steps: Steps) -> None:
    for step in steps:
        log.info("%s", Lazy(step))


class Finalized:
    """It works when it is deleted, where Python catches what is raised."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step

    def __del__(self) -> None:
        self.step()


def in_del(steps: Steps) -> None:
    for step in steps:
        Finalized(step)


def in_callbacks(steps: Steps) -> None:
    async def work() -> None:
        for step in steps:
            asyncio.get_running_loop().call_soon(step)
            await asyncio.sleep(0)

    asyncio.run(work())


def in_an_event_loop(steps: Steps) -> None:
    async def work() -> None:
        for step in steps:
            await asyncio.to_thread(step)

    asyncio.run(work())


def in_a_thread(steps: Steps) -> None:
    with ThreadPoolExecutor(1) as pool:
        for step in steps:
            pool.submit(step).result()


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


def in_a_loader(steps: Steps) -> None:
    for _, step in zip(DataLoader(Slow(), num_workers=1), steps, strict=False):
        step()


def in_ddp(steps: Steps) -> None:
    from distman import DistributedManager

    model = DistributedManager().wrap_ddp(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        step()
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def with_open_files(steps: Steps) -> None:
    """Write to files that nothing closes but the end of the program."""
    folder = files_folder()
    folder.mkdir()
    text = (folder / "log.txt").open("w")
    table = csv.writer((folder / "table.csv").open("w", newline=""))
    pickled = (folder / "rows.pickle").open("wb")
    packed = gzip.open(folder / "log.gz", "wt")  # noqa: SIM115 - what is tested
    archive = zipfile.ZipFile(folder / "parts.zip", "w")
    numbers = h5py.File(folder / "numbers.h5", "w")
    _temporary = tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile()  # noqa: SIM115 - the same
    for index, step in enumerate(steps):
        row = f"step {index}"
        text.write(f"{row}\n")
        table.writerow([row])
        pickle.dump(row, pickled)
        packed.write(f"{row}\n")
        archive.writestr(row, row)
        numbers[row] = index
        step()


def files_folder() -> Path:
    return Path(os.environ["TMPDIR"]).with_suffix(".files")


def broken_files(around: str, folder: Path) -> list[str]:
    """Return those of the files that a program writes that are not whole."""
    found = []
    for name, check in FILES.get(around, {}).items():
        try:
            check(folder / name)
        except Exception as error:  # noqa: BLE001 - whatever reads the file raises whatever it likes
            found.append(f"{name}: {error!r}")
    return found


def check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        archive.testzip()


def check_numbers(path: Path) -> None:
    with h5py.File(path, "r") as numbers:
        numbers["step 0"]


FILES: dict[str, dict[str, Callable[[Path], object]]] = {
    "files": {
        "log.txt": lambda path: path.read_text().splitlines()[-1].index("step"),
        "table.csv": lambda path: path.read_text().splitlines()[-1].index("step"),
        "rows.pickle": lambda path: pickle.loads(path.read_bytes()),  # noqa: S301 - it is our own
        "log.gz": lambda path: gzip.decompress(path.read_bytes()).index(b"step"),
        "parts.zip": check_archive,
        "numbers.h5": check_numbers,
    },
    "with": {"parts.zip": check_archive, "closed.txt": Path.read_text},
    "exit-handler": {"summary.txt": Path.read_text},
    "save": {"state.pt": Path.read_bytes},
}


def with_children(steps: Steps) -> None:
    """Have a child that nobody ends if something fails."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    plain(steps)
    child.kill()


def in_a_pool(steps: Steps) -> None:
    """Have workers that are busy, and others whose pool nothing closes but the end of the program."""
    context = multiprocessing.get_context("fork")
    kept = context.Pool(1)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        working = pool.submit(time.sleep, 0.5)
        for step in steps:
            if working.done():
                working = pool.submit(time.sleep, 0.5)
            step()
    kept.terminate()


def in_contexts(steps: Steps) -> None:
    """Have things around the work that its end, however it comes, must complete."""
    folder = files_folder()
    folder.mkdir()
    with ExitStack() as stack:
        stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(ThreadPoolExecutor(1)).submit(time.sleep, 1)
        stack.enter_context(torch.enable_grad())
        archive = stack.enter_context(zipfile.ZipFile(folder / "parts.zip", "w"))
        archive.writestr("parts", "all of them")
        stack.callback((folder / "closed.txt").write_text, "closed")
        plain(steps)


def with_an_exit_handler(steps: Steps) -> None:
    """Write a summary at the end, as trackers do."""
    folder = files_folder()
    folder.mkdir()
    atexit.register((folder / "summary.txt").write_text, "summary")
    plain(steps)


def in_a_command(steps: Steps) -> None:
    """Be a function of click, which ends the program itself."""
    import click

    click.Command("train", callback=lambda: plain(steps)).main([])


def with_a_save(steps: Steps) -> None:
    """Save what there is when another rank fails."""
    from distman import JobFailed
    from distman.checkpoint import save

    try:
        plain(steps)
    except JobFailed as failure:
        save({"failed": failure.rank}, files_folder() / "state.pt", local=True)
        raise


def in_a_notebook(steps: Steps) -> None:
    """Be a notebook's kernel, in which each step is a cell; what runs a notebook ends it with the first error."""
    from ipykernel.kernelapp import IPKernelApp

    os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="kernel-")
    file = tempfile.mktemp(prefix="kernel-", suffix=".json")  # noqa: S306 - the kernel writes it
    kernel = IPKernelApp.instance(connection_file=file, outstream_class=None, log_level="ERROR")
    kernel.initialize(["--HistoryManager.enabled=False"])
    errors: list[str] = []
    notebook = threading.Thread(target=run_cells, args=(kernel, steps, errors), daemon=True)
    notebook.start()
    kernel.start()
    notebook.join()
    if errors:
        sys.stderr.write("\n".join(errors) + "\n")
        sys.exit(1)


def run_cells(kernel: Any, steps: Steps, errors: list[str]) -> None:
    """Be the notebook: let the kernel run a cell after another."""
    from jupyter_client import BlockingKernelClient

    client = BlockingKernelClient()
    client.load_connection_info(kernel.get_connection_info())
    client.start_channels()
    client.wait_for_ready()
    for step in steps:
        kernel.shell.user_ns["step"] = step
        content = client.execute("step()", store_history=False, reply=True)["content"]
        if content["status"] != "ok":
            errors += [*content["traceback"], str(content["ename"])]
            break
    # Not client.shutdown(): a kernel that is told so by its control thread may wait for ever for that thread, which
    # publishes over a thread that is closed already. To close the channels before the reply may drop the request.
    # A failure that became known between two cells is raised in the next one, which may be this one.
    while client.execute("exit", store_history=False, reply=True)["content"]["status"] != "ok":
        pass
    client.stop_channels()


AROUND: dict[str, Callable[[Steps], None]] = {
    "plain": plain,
    "finally": with_cleanup,
    "retry": retry,
    "bare": bare,
    "logging": in_logging,
    "del": in_del,
    "callback": in_callbacks,
    "asyncio": in_an_event_loop,
    "thread": in_a_thread,
    "loader": in_a_loader,
    "ddp": in_ddp,
    "files": with_open_files,
    "children": with_children,
    "pool": in_a_pool,
    "with": in_contexts,
    "exit-handler": with_an_exit_handler,
    "click": in_a_command,
    "save": with_a_save,
    "notebook": in_a_notebook,
}
WITH_ALL_RANKS = ("ddp", "finally", "files", "with", "exit-handler", "save")
"""Where what the failing rank does concerns the others, or is compared, so that it must take part."""
