"""File systems of fsspec for tests: one on the disk that several ranks see, and ways in which one fails."""

import errno
import os
import signal
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class DiskFileSystem(LocalFileSystem):
    """A disk behind a URL, for which the package knows nothing but what fsspec offers."""

    protocol = "disk"


class FullFileSystem(DiskFileSystem):
    """A disk with room for a thousand bytes of each file."""

    protocol = "full"

    def put_file(self, path1, path2, **_options):
        Path(self._strip_protocol(path2)).write_bytes(Path(path1).read_bytes()[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path2)


class NeverReplacingFileSystem(DiskFileSystem):
    """A disk whose rename leaves a file that is there, and says nothing."""

    protocol = "never-replacing"

    def mv(self, path1, path2, **options):
        if not self.exists(path2):
            super().mv(path1, path2, **options)


def disk(folder):
    """The URL of a folder on the disk, whose scheme fsspec knows from now on in this process."""
    fsspec.register_implementation("disk", DiskFileSystem, clobber=True)
    return f"disk://{folder}"


def full(folder):
    """The URL of the same folder on a disk that is full."""
    fsspec.register_implementation("full", FullFileSystem, clobber=True)
    return f"full://{folder}"


def never_replacing(folder):
    """The URL of the same folder on a disk whose rename does not replace."""
    fsspec.register_implementation("never-replacing", NeverReplacingFileSystem, clobber=True)
    return f"never-replacing://{folder}"


def kill_in_the_middle():
    """Let this process kill itself when half of a file has come to the disk."""

    def put_file(self, path1, path2, **_options):
        content = Path(path1).read_bytes()
        Path(self._strip_protocol(path2)).write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    DiskFileSystem.put_file = put_file
