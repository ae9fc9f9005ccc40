"""Trees and meshes in one line of text, such as ``world(data=16, model(spatial=8, channel=8))``."""

from __future__ import annotations

import re

from distman.topology._tree import ProcessGroupConfig, ProcessGroupNode

_TOKEN = re.compile(r"[=(),]|[^\s=(),]+")
_SIGNS = frozenset("=(),")
_SIZE = re.compile(r"0*[1-9][0-9]{0,17}")
_REST = "-1"


class NotationError(ValueError):
    """A text is no tree, or no mesh; the message shows the place.

    Attributes:
        text: The text.
        position: Index of the first character that does not fit.

    Example:
        >>> try:
        ...     parse_mesh("data=2, model=two")
        ... except NotationError as error:
        ...     print(error)
        the mesh must have a positive number of ranks or -1 here, got 'two'. Correct the size:
          data=2, model=two
                        ^
    """

    def __init__(self, sentence: str, text: str, position: int) -> None:
        self.text = text
        self.position = position
        line = re.sub(r"\s", " ", text)
        super().__init__(f"{sentence}\n  {line}\n  {' ' * position}^")


def parse_tree(text: str) -> ProcessGroupConfig:
    """Return the tree that a text describes; ``str`` of a tree is such a text.

    Local. A node is ``name``, ``name=size`` or ``name(child, child, ...)``. Leaves have sizes; a node with children
    has their product, which may be written down too: ``model=64(spatial=8, channel=8)``. A name has no white space
    and none of ``=(),``.

    Args:
        text: The root, with its children in brackets.

    Raises:
        NotationError: The text is no tree, or has two nodes of one name.

    Example:
        >>> parse_tree("world(data=2, model(spatial=4, channel=8))").leaves_below("model")
        ['spatial', 'channel']
    """
    reader = _Reader("tree", text)
    config = ProcessGroupConfig(reader.node())
    _read_children(reader, config, config.root)
    reader.expect_end()
    return config


def parse_mesh(text: str) -> dict[str, int]:
    """Return the lengths of a mesh's axes by their names.

    Local.

    Args:
        text: Such as ``data=-1,model=4``; a length of -1 takes what the others leave.

    Raises:
        NotationError: The text is no mesh, or has two axes of one name.

    Example:
        >>> parse_mesh("data=-1, model=4")
        {'data': -1, 'model': 4}
    """
    reader = _Reader("mesh", text)
    axes: dict[str, int] = {}
    while not axes or reader.accept(","):
        name = reader.name()
        reader.expect("=")
        axes[name] = reader.length()
    reader.expect_end()
    return axes


def _read_children(reader: _Reader, config: ProcessGroupConfig, parent: ProcessGroupNode) -> None:
    if not reader.accept("("):
        return
    is_closed = False
    while not is_closed:
        node = reader.node()
        config.add_node(node, parent)
        _read_children(reader, config, node)
        is_closed = reader.expect(",", ")") == ")"


class _Reader:
    """Reads a text from left to right; messages call it ``what``."""

    def __init__(self, what: str, text: str) -> None:
        self._what = what
        self._text = text
        self._tokens = [(match[0], match.start()) for match in _TOKEN.finditer(text)]
        self._tokens.append(("", len(text.rstrip())))
        self._index = 0
        self._names: set[str] = set()

    def accept(self, sign: str) -> bool:
        """Pass over a sign, if it comes next."""
        is_next = self._tokens[self._index][0] == sign
        self._index += is_next
        return is_next

    def expect(self, *signs: str) -> str:
        """Pass over one of these signs, which must come next, and return it."""
        for sign in signs:
            if self.accept(sign):
                return sign
        raise self._error(f"have {' or '.join(map(repr, signs))} here", "Add it, or correct what stands here")

    def expect_end(self) -> None:
        if not self.accept(""):
            raise self._error("end here", "Remove what follows, or open its bracket")

    def node(self) -> ProcessGroupNode:
        name = self.name()
        return ProcessGroupNode(name, self._size() if self.accept("=") else None)

    def name(self) -> str:
        name = self._tokens[self._index][0]
        if not name or name in _SIGNS:
            raise self._error("have a name here", "Write one")
        if name in self._names:
            raise self._error("name each group once", "Choose another name")
        self._names.add(name)
        self._index += 1
        return name

    def length(self) -> int:
        return -1 if self.accept(_REST) else self._size("a positive number of ranks or -1")

    def _size(self, wanted: str = "a positive number of ranks") -> int:
        text = self._tokens[self._index][0]
        if not _SIZE.fullmatch(text):
            raise self._error(f"have {wanted} here", "Correct the size")
        self._index += 1
        return int(text)

    def _error(self, condition: str, remedy: str) -> NotationError:
        token, position = self._tokens[self._index]
        found = repr(token) if token else "the end"
        return NotationError(f"the {self._what} must {condition}, got {found}. {remedy}:", self._text, position)
