"""What ``faulthandler`` writes about a process, in the form of a traceback with source lines."""

from __future__ import annotations

import linecache
import re

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(Current thread|Thread) (?P<id>0x[0-9a-f]+)")
_OWN_FILE = "distman/testing/_rank_loop.py"
_IDLE = re.compile(r"distman/_coordination/timeouts\.py.* in _do_next$")  # a thread that waits for work of the package


def readable_stacks(dump: str) -> str:
    """Return the threads of ``faulthandler``'s dump, the one that runs the test first, innermost frame last."""
    if not dump.strip():
        return "Its stacks cannot be shown: the process did not respond to the signal that asks for them."
    test: list[str] = []
    others: list[str] = []
    for block in re.split(r"\n\s*\n", dump.strip()):
        title, *frames = block.splitlines()
        if frames and _IDLE.search(frames[0]):
            continue
        inner = _frames_of_test(frames)
        if len(inner) < len(frames):
            test += ["The thread of the test (innermost call last):", *_with_sources(inner)]
        else:
            others += ["", f"{_title(title)} (innermost call last):", *_with_sources(frames)]
    return "\n".join([*test, *others]).strip()


def _title(line: str) -> str:
    match = _THREAD.match(line)
    return f"Thread {match['id']}" if match else line


def _frames_of_test(frames: list[str]) -> list[str]:
    """Return the frames of the test, without those of the worker around it."""
    for index, frame in enumerate(frames):
        if _OWN_FILE in frame:
            return frames[:index]
    return frames


def _with_sources(frames: list[str]) -> list[str]:
    lines = []
    for frame in reversed(frames):
        lines.append(frame)
        match = _FRAME.match(frame)
        source = linecache.getline(match["file"], int(match["line"])).strip() if match else ""
        if source:
            lines.append(f"    {source}")
    return lines
