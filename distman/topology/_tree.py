"""Groups inside groups: the tree from which a job's process groups can be planned."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

from distman.errors import _undefined_group


@dataclass
class ProcessGroupNode:
    """A named group in a tree of groups.

    Attributes:
        name: Name of the group.
        size: Number of ranks in each such group; None until it is known.

    Example:
        >>> ProcessGroupNode("model", size=4)
        ProcessGroupNode(name='model', size=4)
    """

    name: str
    size: int | None = None


class ProcessGroupConfig:
    """A tree of groups: the root is the world, and the children of a node are orthogonal to each other inside it.

    The ranks are laid out as in a mesh whose axes are the leaves from left to right: the last leaf varies fastest,
    so that its groups are runs of consecutive ranks.

    Args:
        root: The node of the whole world.

    Raises:
        TypeError: It is no node.

    Example:
        >>> tree = ProcessGroupConfig(ProcessGroupNode("world"))
        >>> tree.add_node(ProcessGroupNode("data", size=2), "world")
        >>> tree.add_node(ProcessGroupNode("model", size=4), "world")
        >>> print(tree, tree.leaf_groups(), tree.update_parent_sizes())
        world(data=2, model=4) ['data', 'model'] 8
    """

    def __init__(self, root: ProcessGroupNode) -> None:
        _check_node("root", root)
        self.root = root
        self._nodes = {root.name: root}
        self._children: dict[str, list[str]] = {root.name: []}

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Add a node below another.

        Local.

        Args:
            node: The node.
            parent: The node above it, or its name.

        Raises:
            TypeError: It is no node.
            ValueError: There is a node of that name already.
            UndefinedGroupError: There is no such parent.

        Example:
            >>> tree = parse_tree("world(data=2, model)")
            >>> tree.add_node(ProcessGroupNode("spatial", size=4), "model")
            >>> print(tree)
            world(data=2, model(spatial=4))
        """
        _check_node("node", node)
        if node.name in self._nodes:
            raise ValueError(f"a node's name must not be taken in its tree, got {node.name!r}. Choose another name.")
        above = self.get_node(parent if isinstance(parent, str) else parent.name)
        self._nodes[node.name] = node
        self._children[node.name] = []
        self._children[above.name].append(node.name)

    def get_node(self, name: str) -> ProcessGroupNode:
        """Return the node of that name.

        Local.

        Args:
            name: Name of the node.

        Raises:
            UndefinedGroupError: There is no such node.

        Example:
            >>> parse_tree("world(data=2, model=4)").get_node("model").size
            4
        """
        if name not in self._nodes:
            raise _undefined_group(name, self._nodes, "a node of the tree")
        return self._nodes[name]

    def children(self, name: str) -> list[ProcessGroupNode]:
        """Return the nodes right below a node, in the order in which they were added.

        Local.

        Args:
            name: Name of the node.

        Raises:
            UndefinedGroupError: There is no such node.

        Example:
            >>> [node.name for node in parse_tree("world(data=2, model(spatial=4, channel=8))").children("world")]
            ['data', 'model']
        """
        return [self._nodes[child] for child in self._children[self.get_node(name).name]]

    def leaf_groups(self) -> list[str]:
        """Return the names of the nodes without children, from left to right.

        Local.
        """
        return self.leaves_below(self.root.name)

    def leaves_below(self, name: str) -> list[str]:
        """Return the names of the leaves below a node, from left to right; of a leaf, its own.

        Local.

        Args:
            name: Name of the node.

        Raises:
            UndefinedGroupError: There is no such node.

        Example:
            >>> parse_tree("world(data=2, model(spatial=4, channel=8))").leaves_below("model")
            ['spatial', 'channel']
        """
        children = self.children(name)
        return [leaf for child in children for leaf in self.leaves_below(child.name)] if children else [name]

    def nodes_below_root(self) -> list[ProcessGroupNode]:
        """Return all nodes except the root, parents before their children.

        Local.
        """
        found = self.children(self.root.name)
        for node in found:
            found += self.children(node.name)  # the loop comes to them, too
        return found

    def set_leaf_group_sizes(self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True) -> None:
        """Set the sizes of leaves.

        Local.

        Args:
            group_sizes: Number of ranks by name of leaf.
            update_parent_sizes: Also compute the sizes of the nodes above, as :meth:`update_parent_sizes` does.

        Raises:
            UndefinedGroupError: There is no such node.
            ValueError: A node is no leaf, or a size is no positive number.

        Example:
            >>> tree = parse_tree("world(data, model(spatial, channel))")
            >>> tree.set_leaf_group_sizes({"data": 2, "spatial": 4, "channel": 8})
            >>> tree.root.size, tree.get_node("model").size
            (64, 32)
        """
        for name, size in group_sizes.items():
            if self.children(name):
                raise ValueError(
                    f"sizes must be given for leaves only, got one for {name!r}. Its size is the product of its leaves."
                )
            _check_size(name, size)
        for name, size in group_sizes.items():
            self._nodes[name].size = int(size)
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self) -> int:
        """Set the size of every node with children to the product of its children's, and return the root's.

        Local.

        Raises:
            ValueError: A leaf has no size.
        """
        return self._update(self.root)

    def _update(self, node: ProcessGroupNode) -> int:
        children = self.children(node.name)
        if children:
            node.size = math.prod([self._update(child) for child in children])
        return _check_size(node.name, node.size)

    def __str__(self) -> str:
        return self._draw(self.root)

    def _draw(self, node: ProcessGroupNode) -> str:
        below = ", ".join(self._draw(child) for child in self.children(node.name))
        if below:
            return f"{node.name}({below})"
        return node.name if node.size is None else f"{node.name}={node.size}"


def _check_size(name: str, size: object) -> int:
    if not isinstance(size, Integral) or size < 1:
        raise ValueError(f"the size of group {name!r} must be a positive number of ranks, got {size!r}. Set it.")
    return int(size)


def _check_node(name: str, node: object) -> None:
    if not isinstance(node, ProcessGroupNode):
        raise TypeError(
            f"{name} must be a ProcessGroupNode, got {node!r}. Write ProcessGroupNode('world'), for example."
        )


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
