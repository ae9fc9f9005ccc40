"""Kill a process with SIGKILL while it writes a checkpoint over an older one: say what can be loaded then."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SIZE = 50_000_000  # weights, 200 MB in each file
ENOUGH = 20_000_000  # bytes of the new checkpoint that must be on the disk when the kill comes
PEERS = ["torch", "torch-dcp", "accelerate", "fabric", "physicsnemo", "physicsnemo-epochs", "distman"]


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(SIZE, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def save(peer: str, folder: Path, value: int) -> None:
    model = model_of(value)
    if peer == "torch":
        torch.save(model.state_dict(), folder / "model.pt")
    elif peer == "torch-dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    elif peer == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_state(str(folder))
    elif peer == "fabric":
        from lightning_fabric import Fabric

        Fabric(accelerator="cpu").save(folder / "model.pt", {"model": model.state_dict()})
    elif peer.startswith("physicsnemo"):
        from physicsnemo.utils import save_checkpoint

        save_checkpoint(folder, models=model, epoch=value if peer.endswith("epochs") else 1)
    else:
        from distman import checkpoint

        checkpoint.save({"model": model.state_dict()}, folder / "model.pt")


def load(peer: str, folder: Path) -> list[float]:
    """Return the value of the weights that the peer loads."""
    model = model_of(0)
    if peer == "torch":
        model.load_state_dict(torch.load(folder / "model.pt"))
    elif peer == "torch-dcp":
        import torch.distributed.checkpoint as dcp

        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(state)
    elif peer == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.load_state(str(folder))
    elif peer == "fabric":
        from lightning_fabric import Fabric

        model.load_state_dict(Fabric(accelerator="cpu").load(folder / "model.pt")["model"])
    elif peer.startswith("physicsnemo"):
        from physicsnemo.utils import load_checkpoint

        load_checkpoint(folder, models=model)
    else:
        from distman import checkpoint

        model.load_state_dict(checkpoint.load(folder / "model.pt")["model"])
    return sorted(set(model.weight.detach().unique().tolist()))


def files_of(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return inode, time and size of each file; a file may vanish meanwhile."""
    found = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def kill_while_it_writes(process: subprocess.Popen, folder: Path) -> None:
    before = files_of(folder)
    process.stdin.write(b"\n")
    process.stdin.flush()
    while process.poll() is None:
        new = [facts for path, facts in files_of(folder).items() if before.get(path) != facts]
        if sum(size for *_, size in new) >= ENOUGH:
            process.kill()
            return
        time.sleep(0.0005)  # what writes is another library, which does not say how far it is
    sys.exit("the process ended before it was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--save", help="save twice into this folder, the second time after a line on standard input")
    parser.add_argument("--temporary", help="where temporary files go; beside the checkpoints, unless it is given")
    options = parser.parse_args()
    if options.save:
        save(options.peer, Path(options.save), 1)
        print("saved", flush=True)
        sys.stdin.readline()
        save(options.peer, Path(options.save), 2)
        return
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder, temporary = Path(name) / "checkpoints", Path(name) / "temporary"
        folder.mkdir()
        temporary.mkdir()
        command = [sys.executable, __file__, options.peer, "--save", str(folder)]
        environ = {**os.environ, "TMPDIR": options.temporary or str(temporary)}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
            if b"saved\n" not in iter(process.stdout.readline, b""):
                sys.exit("the first save failed")
            kill_while_it_writes(process, Path(name))
        print(
            f"{options.peer}: left",
            {str(path.relative_to(name)): size for path, (*_, size) in files_of(Path(name)).items()},
        )
        try:
            print(f"{options.peer}: loads weights of save {load(options.peer, folder)}")
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
            print(f"{options.peer}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")


if __name__ == "__main__":
    main()
