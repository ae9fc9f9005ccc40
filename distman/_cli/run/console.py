"""What the ranks write, as whole lines with the rank before each; a bar that a rank draws keeps the last line."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

_COLORS = (36, 33, 35, 32, 34, 31)  # foreground colours of ranks, in turn. Source: ECMA-48, SGR 30 to 37
_MOST_WITHOUT_END = 1 << 16  # bytes of a line after which it is shown though it has no end: memory is bounded
COMMAND = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")  # to a terminal. Source: ECMA-48, control sequences
_CLEAR_LINE = b"\r\x1b[K"


@contextmanager
def despite_closed_terminal(stream: IO[Any]) -> Iterator[None]:
    """Let a stream lead nowhere once its terminal is closed: the ranks may still save."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Console:
    """Shows what several ranks write to one stream of this process.

    On a terminal, a line that has no end yet is drawn at once, such as a bar or a question, and drawn again below the
    lines of others: that of the rank that began first, until it has ended. Elsewhere only whole lines are shown, and of
    one that was drawn again and again the last state. Names of ranks have colours on a terminal, unless ``NO_COLOR`` is
    set; of a single rank no name is shown.
    """

    def __init__(self, stream: IO[bytes], num_ranks: int) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._is_colored = self.is_terminal and not os.environ.get("NO_COLOR")
        self._num_ranks = num_ranks
        self._pending: dict[tuple[int, int], bytes] = {}
        self._drawn: tuple[tuple[int, int], bytes] | None = None

    @property
    def columns(self) -> int:
        """Columns that a rank has for its lines on the terminal."""
        return max(20, shutil.get_terminal_size().columns - self._width)

    @property
    def _width(self) -> int:
        return len(f"{self._num_ranks - 1}: ") if self._num_ranks > 1 else 0

    def write(self, rank: int, data: bytes, stream: int = 1) -> None:
        """Take what a rank has written, cut anywhere; ``stream`` is its own, where several of it end up here."""
        with despite_closed_terminal(self._stream):
            self._take(rank, data, stream)
            self._stream.flush()

    def _take(self, rank: int, data: bytes, stream: int) -> None:
        key = rank, stream
        *lines, rest = (self._pending.pop(key, b"") + data).split(b"\n")
        if len(rest) > _MOST_WITHOUT_END:
            lines, rest = [*lines, rest], b""
        if rest:
            self._pending[key] = rest
        if self._drawn is not None and self._drawn[0] == key and lines:
            self._drawn = None
            self._stream.write(_CLEAR_LINE)
        if lines:
            self._show(self._prefix(rank) + _last_state(line) + b"\n" for line in lines)
        if rest and self.is_terminal and (self._drawn is None or self._drawn[0] == key):
            self._drawn = key, self._prefix(rank) + self._fitted(_last_state(rest))
            self._stream.write(_CLEAR_LINE + self._drawn[1])

    def close(self) -> None:
        """Show the last lines, though they have no end."""
        for rank, stream in list(self._pending):
            self.write(rank, b"\n", stream)

    def _show(self, lines: Iterable[bytes]) -> None:
        """Show whole lines, above the one that is drawn."""
        before, after = (_CLEAR_LINE, self._drawn[1]) if self._drawn is not None else (b"", b"")
        self._stream.write(b"".join([before, *lines, after]))

    def _fitted(self, line: bytes) -> bytes:
        """Return a line that does not go on in the next row, where it could not be cleared."""
        visible = COMMAND.sub(b"", line).decode(errors="replace")
        return line if len(visible) < self.columns else visible[: self.columns - 1].encode()

    def _prefix(self, rank: int) -> bytes:
        if self._num_ranks == 1:
            return b""
        name = f"{rank:>{self._width - 2}}:"
        return (f"\x1b[{_COLORS[rank % len(_COLORS)]}m{name}\x1b[0m " if self._is_colored else f"{name} ").encode()


def _last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line that was drawn again and again."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
