"""Groups inside groups: the tree from which a job's process groups can be planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
        waiting, found = self.children(self.root.name), []
        while waiting:
            node = waiting.pop(0)
            found.append(node)
            waiting += self.children(node.name)
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
            self._nodes[name].size = size
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


def _check_size(name: str, size: int | None) -> int:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"the size of group {name!r} must be a positive number of ranks, got {size}. Set it.")
    return size


def _check_node(name: str, node: object) -> None:
    if not isinstance(node, ProcessGroupNode):
        raise TypeError(
            f"{name} must be a ProcessGroupNode, got {node!r}. Write ProcessGroupNode('world'), for example."
        )
