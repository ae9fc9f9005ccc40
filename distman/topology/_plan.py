"""The groups that a job wants, as partitions that all ranks can compare."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from distman.topology._partition import GridPartition, Partition, is_whole_number
from distman.topology._tree import ProcessGroupConfig

READY_MADE = ("node", "leaders")
"""Names of the groups that every job has: the ranks of a host, and the first rank of each host."""


def check_new_names(names: Iterable[str], taken: Container[str]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"the name of a group must be a str, got {name!r}. Choose a name; None stands for the world."
            )
        if not name:
            raise ValueError("the name of a group must not be empty, got ''. Choose a name.")
        if name in taken:
            raise ValueError(f"the name of a group must not be taken, got {name!r}. Choose another name.")


@dataclass(frozen=True)
class Plan:
    """Groups to be made together.

    Attributes:
        partitions: The partition of the world for each name of a group.
        later: The same for groups that are made by their members when they are first used.

    Example:
        >>> plan = mesh_plan((2, 3), ("data", "model"), world_size=6)
        >>> plan.partitions["data"].block_of(4)
        (1, 4)
    """

    partitions: dict[str, Partition]
    later: dict[str, Partition] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hash that is equal on two ranks exactly if they plan the same groups, in whatever order."""
        lines = sorted(f"{name!r} {partition.key}" for name, partition in self._all.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(f"{name}: {partition}" for name, partition in self._all.items())

    @property
    def _all(self) -> dict[str, Partition]:
        return {**self.partitions, **self.later}


def mesh_plan(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], world_size: int) -> Plan:
    """Return the plan of a mesh: one group per axis.

    Local.

    Args:
        mesh_shape: Length of each axis; one may be -1 and takes what the others leave.
        mesh_dim_names: Name of each axis, which is also the name of its group.
        world_size: Number of ranks.

    Raises:
        ValueError: The mesh does not fit the world.
        TypeError: ``mesh_dim_names`` is one text.

    Example:
        >>> print(mesh_plan((-1, 3), ("data", "model"), world_size=6))
        data: [0, 3] [1, 4] [2, 5]
        model: [0, 1, 2] [3, 4, 5]
    """
    shape = resolve_mesh_shape(mesh_shape, mesh_dim_names, world_size)
    return Plan({name: GridPartition.of(shape, [axis]) for axis, name in enumerate(mesh_dim_names)})


def resolve_mesh_shape(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], world_size: int) -> tuple[int, ...]:
    """Return the shape of a mesh with its -1 replaced, of as many ranks as the world."""
    if isinstance(mesh_dim_names, str):
        raise TypeError(f"mesh_dim_names must be a sequence of names, got {mesh_dim_names!r}. Pass a tuple of names.")
    shape = tuple(mesh_shape)
    if not shape or len(shape) != len(mesh_dim_names) or len(set(mesh_dim_names)) != len(shape):
        raise ValueError(
            f"mesh_dim_names must name each of the {len(shape)} axes of mesh_shape once, got {tuple(mesh_dim_names)}. "
            "Pass one name per axis."
        )
    if not all(map(is_whole_number, shape)):
        raise ValueError(f"mesh_shape must hold whole numbers, got {shape}. Pass the length of each axis.")
    known = math.prod(length for length in shape if length != -1)
    if shape.count(-1) == 1 and known > 0 and world_size % known == 0:
        shape = tuple(world_size // known if length == -1 else length for length in shape)
    if min(shape) < 1 or math.prod(shape) != world_size:
        raise ValueError(
            f"mesh_shape must multiply to the world size {world_size}, got {tuple(mesh_shape)}. "
            f"{_remedy(mesh_shape, mesh_dim_names, world_size)}; one axis may be -1."
        )
    return shape


def tree_plan(config: ProcessGroupConfig, world_size: int) -> Plan:
    """Return the plan of a tree: one group per node below the root, which is the world itself.

    Local. The leaves are the axes of a mesh, from left to right, so a tree of leaves only gives the plan of that
    mesh.

    Args:
        config: The tree, with its leaves' sizes.
        world_size: Number of ranks.

    Raises:
        ValueError: A leaf has no size, a node's size is not the product of its leaves', or the tree does not fit
            the world.

    Example:
        >>> print(tree_plan(parse_tree("world(data=2, model(spatial=2, channel=2))"), world_size=8))
        data: [0, 4] [1, 5] [2, 6] [3, 7]
        model: [0, 1, 2, 3] [4, 5, 6, 7]
        spatial: [0, 2] [1, 3] [4, 6] [5, 7]
        channel: [0, 1] [2, 3] [4, 5] [6, 7]
    """
    leaves = config.leaf_groups()
    if leaves == [config.root.name]:
        if config.root.size not in (None, world_size):
            raise ValueError(
                f"the root of the tree must have the world size {world_size}, got {config.root.size}. Set it, or "
                "leave it out."
            )
        return Plan({})
    sizes = {name: config.get_node(name).size for name in leaves}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise ValueError(
            f"every leaf of the tree must have a size, got none for {missing}. Call set_leaf_group_sizes()."
        )
    shape = [size for size in sizes.values() if size is not None]
    if min(shape) < 1 or math.prod(shape) != world_size:
        raise ValueError(
            f"the leaves of the tree must multiply to the world size {world_size}, got {config}. "
            f"{_remedy(shape, leaves, world_size)}."
        )
    for node in [config.root, *config.nodes_below_root()]:
        size = math.prod(sizes[leaf] or 1 for leaf in config.leaves_below(node.name))
        if node.size not in (None, size):
            raise ValueError(
                f"the size of group {node.name!r} must be the product {size} of its leaves, got {node.size}. "
                "Call update_parent_sizes()."
            )
    nodes = config.nodes_below_root()
    axes = {node.name: [leaves.index(leaf) for leaf in config.leaves_below(node.name)] for node in nodes}
    return Plan({name: GridPartition.of(shape, along) for name, along in axes.items()})


def _remedy(shape: Sequence[int], names: Sequence[str], world_size: int) -> str:
    """Say which one length would make a mesh fit, or which world would."""
    known = math.prod(length for length in shape if length != -1)
    if known < 1 or min(shape) < -1 or list(shape).count(-1) > 1:
        return "Correct it"
    if -1 in shape:
        return f"Start a multiple of {known} ranks, or correct the lengths"
    others = {name: known // length for name, length in zip(names, shape, strict=True)}
    fitting = [f"{name}={world_size // rest}" for name, rest in others.items() if world_size % rest == 0]
    return f"Set {' or '.join(fitting)}, or start {known} ranks" if fitting else f"Start {known} ranks, or correct it"
