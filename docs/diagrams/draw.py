"""Draws the pictures of the documentation: ``python docs/diagrams/draw.py [FOLDER]``.

They are as wide as a telephone shows without making their text smaller.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from svg import Drawing

from distman.topology import mesh_plan

HERE = Path(__file__).parent
WIDTH = 400
# Titles of the layers from the named one down to the next title.
BANDS = {
    "testing": ("around", "a job"),
    "compat": ("whole", "tasks"),
    "decorators": ("work that", "ranks share"),
    "manager": ("the job",),
    "_coordination": ("what ranks tell", "each other"),
    "_workers": ("processes,", "torch"),
    "environments": ("facts, without", "torch"),
}


def draw_lanes(drawing: Drawing, lanes: dict[str, int], start: int = 28) -> None:
    """Draw a line down from the name of each process."""
    for name, x in lanes.items():
        drawing.line(x, start, x, drawing.height, "faint")
        drawing.box(x, start - 14, 86, 26, name, text="title")


def start() -> Drawing:
    """Draw what the ranks do within ``initialize()``, from top to bottom."""
    drawing = Drawing(WIDTH, 506)
    first, store, others = 144, 248, 350
    draw_lanes(drawing, {"rank 0": first, "other ranks": others})
    drawing.line(store, 146, store, drawing.height, "faint")
    steps = {62: "environment", 124: "store", 232: "membership", 404: "process group", 466: "work"}
    for number, (y, step) in enumerate(steps.items(), start=1):
        for line, word in enumerate(step.split()):
            drawing.text(14, y + 16 * line, word, kind="muted", anchor="start")
        drawing.text(0, y, str(number), kind="muted", anchor="start")
    for x in (first, others):
        drawing.box(x, 70, 94, 42, "reads what the", "launcher says")
    drawing.arrow(first, store - 30, 132, "starts")
    drawing.box(store, 132, 56, 28, "store", kind="blue", text="title")
    drawing.arrow(first, store, 188, "handshake")
    drawing.arrow(others, store, 188, "handshake")
    drawing.arrow(first, store, 240, "join record")
    drawing.arrow(others, store, 240, "join records")
    drawing.arrow(store, first, 276, "all records")
    drawing.box(first, 308, 100, 40, "missing, double,", "unlike ranks?")
    drawing.arrow(first, store, 356, "verdict")
    drawing.arrow(store, others, 356, "verdict")
    drawing.arrow(first, others, 412, "connections of gloo or NCCL")
    drawing.arrow(others, first, 412)
    for x in (first, others):
        drawing.box(x, 474, 94, 42, "the rest of", "train.py", kind="green")
    drawing.arrow(store, first + 47, 474, "watch")
    drawing.arrow(store, others - 47, 474, "watch")
    return drawing


def failure() -> Drawing:
    """Draw how the failure of one rank reaches the others."""
    drawing = Drawing(WIDTH, 474)
    failing, store, others = 66, 196, 328
    draw_lanes(drawing, {"rank 1": failing, "store": store, "other ranks": others})
    drawing.box(failing, 60, 124, 28, "computes", kind="green")
    drawing.box(others, 110, 140, 128, "wait in a collective,", "read a file,", "or compute", kind="green")
    drawing.box(failing, 110, 124, 44, "ValueError: sample", "17 has no label", kind="red")
    drawing.arrow(failing, store - 55, 194, "", kind="red")
    drawing.text((failing + store - 55) / 2 - 8, 182, "failure record")
    drawing.box(store, 194, 110, 44, "the first record", "counts", kind="blue")
    drawing.arrow(store, others, 258, "each watcher looks", "5 times a second", kind="red")
    drawing.box(failing, 258, 130, 44, "prints its traceback,", "exit code 1")
    drawing.box(
        others,
        305,
        140,
        78,
        "JobFailed:",
        "rank 1 (n2, pid 812)",
        "raised ValueError:",
        "sample 17 has ...",
        kind="red",
    )
    drawing.line(0, 364, WIDTH, 364, "faint")
    drawing.box(failing, 400, 124, 44, "is killed: SIGKILL,", "out of memory", kind="red")
    drawing.line(failing + 62, 400, store - 62, 400, "faint")
    drawing.box(store, 400, 116, 44, "connection lost:", "writes the record", kind="blue")
    drawing.arrow(store, others - 70, 448, "", kind="red")
    drawing.box(others, 436, 140, 44, "JobFailed:", "rank 1 (...) died", kind="red")
    return drawing


def mesh() -> Drawing:
    """Draw the groups of a mesh of two axes, as the package plans them."""
    plan = mesh_plan((2, 4), ("data", "model"), world_size=8)
    drawing = Drawing(WIDTH, 240)
    left, top, cell = 118, 70, 64
    for rank in range(8):
        drawing.box(left + rank % 4 * cell, top + rank // 4 * cell, 38, 38, str(rank), text="title")
    for axis, kind, margin in (("model", "blue", 26), ("data", "green", 30)):
        for block in plan.partitions[axis].blocks():
            columns, rows = [rank % 4 for rank in block], [rank // 4 for rank in block]
            width = (max(columns) - min(columns)) * cell + 2 * margin
            height = (max(rows) - min(rows)) * cell + 2 * margin
            x, y = left + sum(columns) / len(block) * cell, top + sum(rows) / len(block) * cell
            drawing.box(x, y, width, height, kind=f"{kind} outline")
    for host in range(2):
        drawing.text(0, top + host * cell, f"host {host}", anchor="start", kind="muted")
    for axis, y, kind in (("model", 196, "blue"), ("data", 228, "green")):
        groups = [", ".join(map(str, block)) for block in plan.partitions[axis].blocks()]
        drawing.box(20, y, 24, 16, kind=f"{kind} outline")
        drawing.text(42, y, f"{axis}:  {'  |  '.join(groups)}", anchor="start")
    drawing.text(left + 1.5 * cell, 18, "mesh of data=2, model=4", kind="title")
    return drawing


def layers() -> Drawing:
    """Draw the layers that the linter of imports keeps, by its own table."""
    with (HERE.parents[1] / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    rows = next([row.split(" | ") for row in one["layers"]] for one in contracts if one["name"] == "Imports go down")
    assert rows[0][0] in BANDS, "the topmost layer must have a title. Give it one in BANDS."  # noqa: S101
    assert set(BANDS) <= {row[0] for row in rows}, "titles must belong to layers. Compare BANDS."  # noqa: S101
    drawing = Drawing(WIDTH, 26 * len(rows) + 10 * len(BANDS) + 26)
    y = 4
    for row in rows:
        if row[0] in BANDS:
            y += 10
            drawing.line(0, y - 5, WIDTH, y - 5, "faint")
            drawing.text(0, y + 12 * len(BANDS[row[0]]), *BANDS[row[0]], kind="muted", anchor="start")
        width = 296 / len(row)
        for number, name in enumerate(row):
            kind = "" if name.startswith("_") else "blue"
            drawing.box(104 + (number + 0.5) * width, y + 13, width - 4, 22, name, kind=kind, text="name")
        y += 26
    drawing.text(WIDTH, y + 14, "blue: public.  Imports go down.", kind="muted", anchor="end")
    return drawing


def pictures() -> Iterator[tuple[str, str]]:
    """Return the name and the content of each file."""
    for draw in (start, failure, mesh, layers):
        yield f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, content in pictures():
        (folder / name).write_text(content, encoding="utf-8")
