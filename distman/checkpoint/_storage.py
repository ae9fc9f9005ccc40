"""What a checkpoint needs of the place where it is kept: one protocol, which a site can implement for its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import IO, Protocol

METADATA = ".metadata"
"""Name of the table of contents of a sharded state, which is written last.

Source:
    ``torch.distributed.checkpoint``.
"""


class NewFolder(Protocol):
    """A folder that is filled where nobody looks, and becomes visible when it is complete.

    Attributes:
        path: Where its files go until then.

    Example:
        >>> class Upload(NewFolder):  # in a store of names and contents, where a name can stand for a folder
        ...     def __init__(self, store, place, attempt):
        ...         self.store, self.place, self.path = store, place, f"{place}.{attempt}"
        ...     def publish(self):
        ...         self.store[self.place] = self.path
        >>> store = {"run": "run.1"}
        >>> Upload(store, "run", attempt=2).publish()
        >>> store
        {'run': 'run.2'}
    """

    path: str

    def publish(self) -> None:
        """Make the folder the one that is found from now on, and remove the one before.

        Local. Blocking. That the one before cannot be removed is no error: the new one has been published.
        """

    def discard(self) -> None:
        """Remove the folder, unless it was published.

        Local. Blocking.
        """


class Storage(Protocol):
    """Where checkpoints are kept, such as a disk or an object store.

    A place is a string that :meth:`resolve` returned, with a slash and a name for what is in it. Methods run on rank 0
    or on every rank, and in threads at the same time; what they raise reaches all ranks. :func:`register_storage` adds
    one.

    Example:
        >>> import contextlib, io
        >>> class InMemory(Storage):  # what save and load need
        ...     files = {}
        ...     def resolve(self, path):
        ...         return path
        ...     @contextlib.contextmanager
        ...     def create(self, place):
        ...         file = io.BytesIO()
        ...         yield file
        ...         self.files[place] = file.getvalue()  # not where the block raised
        ...     def open(self, place):
        ...         return io.BytesIO(self.files[place])
        >>> register_storage("here", InMemory())
        >>> save({"step": 7}, "here://state.pt")
        >>> load("here://state.pt")
        {'step': 7}
    """

    def resolve(self, path: str) -> str:
        """Return the place that a path or URL stands for, the same whatever the current folder is later on.

        Local. Nothing is looked up in a store that is far away. Users get places back as the paths of checkpoints, and
        pass them on: a place should be a URL of the same scheme, which stands for itself.

        Args:
            path: What the user passed, such as ``"scheme://folder/state.pt"``.

        Raises:
            ValueError: It cannot be a place in this storage.
        """

    def create(self, place: str) -> AbstractContextManager[IO[bytes]]:
        """Return a context that writes a file, which replaces the old one if the block ends without an error.

        Local. Blocking. Whatever ends the block or the process, a reader finds the old file or the whole new one.
        Folders above the file are made; what an earlier write of this file left when it was killed is removed. The file
        that the block gets may be unbuffered: one call of ``write`` may take fewer bytes than it is given, and returns
        how many.

        Args:
            place: The file.

        Raises:
            OSError: It could not be written; the old file is as it was.
        """

    def open(self, place: str) -> IO[bytes]:
        """Return a file to read from, with ``seek`` and ``tell``; links are followed.

        Local. Blocking.

        Args:
            place: The file, or a link to it.

        Raises:
            FileNotFoundError: There is no such file.
        """

    def list(self, folder: str) -> list[str]:
        """Return the names of the complete files, links and folders in a folder; none if there is no such folder.

        Local. Blocking.

        Args:
            folder: The folder.
        """

    def saved_at(self, place: str) -> int:
        """Return when a file was written, in nanoseconds; only compared with other files of the same storage.

        Local. Blocking.

        Args:
            place: The file.

        Raises:
            FileNotFoundError: There is no such file.
        """

    def remove(self, place: str) -> None:
        """Remove a file or folder, if it is there.

        Local. Blocking. Whatever ends the process meanwhile, :meth:`folder` finds no half of a folder.

        Args:
            place: The file or link, or the folder, as :meth:`new_folder` got it.
        """

    def remove_leftovers(self, folder: str) -> None:
        """Remove what writers left half-written in a folder when they were killed.

        Local. Blocking.

        Args:
            folder: The folder; it may not exist.
        """

    def link(self, place: str, target: str) -> None:
        """Let a name stand for another file or folder of its folder, from one moment to the next.

        Local. Blocking.

        Args:
            place: The link; it may exist.
            target: Name of what it stands for.
        """

    def linked(self, place: str) -> str | None:
        """Return the name that a link stands for, or its own if it is a file; None if there is neither.

        Local. Blocking.

        Args:
            place: The link or file.
        """

    def new_folder(self, place: str) -> NewFolder:
        """Return a folder to be filled with :meth:`create`, by other processes too, and then published.

        Local. Blocking.

        Args:
            place: The folder; it may exist.
        """

    def folder(self, place: str) -> str:
        """Return where the files of the folder are that was published last.

        Local. Blocking.

        Args:
            place: The folder, as :meth:`new_folder` got it.
        """
