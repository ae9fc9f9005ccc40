"""The ranks of a job in blocks, where every rank is in exactly one, and the groups that a job wants as such."""

from __future__ import annotations

import abc
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from distman.topology._tree import ProcessGroupConfig

# How many blocks, and ranks of a block, a text shows: a plan of 65,536 ranks must fit into an error message.
_SHOWN_BLOCKS = 4
_SHOWN_RANKS = 8


def is_whole_number(value: object) -> bool:
    """Return whether a value is an integer of Python's or NumPy's."""
    return isinstance(value, Integral)


def split_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` balanced parts of ``length``, larger parts first.

    Local.

    Args:
        length: Length of a dim, 0 or more.
        parts: Number of parts, such as that of the ranks, 1 or more.

    Raises:
        ValueError: There is no such split.
        TypeError: A number is not whole.

    Example:
        >>> split_sizes(10, 4)
        [3, 3, 2, 2]
    """
    for name, value in (("length", length), ("parts", parts)):
        if not is_whole_number(value):
            raise TypeError(f"{name} must be a whole number, got {value!r}. Pass an integer.")
    if parts < 1 or length < 0:
        raise ValueError(
            f"length must be at least 0 and parts at least 1, got length {length} and parts {parts}. Pass the length "
            "of a dim and a number of ranks."
        )
    size, num_larger = divmod(length, parts)
    return [size + 1] * num_larger + [size] * (parts - num_larger)


class Partition(abc.ABC):
    """The ranks of a job in blocks of ascending ranks.

    Example:
        >>> pairs = mesh_plan((4, 2), ("data", "model"), world_size=8).partitions["model"]
        >>> print(pairs)
        [0, 1] [2, 3] [4, 5] [6, 7]
        >>> print(pairs.orthogonal())
        [0, 2, 4, 6] [1, 3, 5, 7]
    """

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abc.abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks."""

    @abc.abstractmethod
    def block_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the block that holds a rank, ascending.

        Local. It takes time in proportion to that block, not to the world.

        Args:
            rank: The rank, below :attr:`world_size`.

        Example:
            >>> mesh_plan((4, 2), ("data", "model"), world_size=8).partitions["model"].block_of(5)
            (4, 5)
        """

    @abc.abstractmethod
    def blocks(self) -> Iterator[tuple[int, ...]]:
        """Return all blocks, ordered by their first ranks.

        Local.
        """

    @abc.abstractmethod
    def split(self, size: int) -> Partition:
        """Return the partition into consecutive pieces of each block.

        Local.

        Args:
            size: Number of ranks in each piece.

        Raises:
            ValueError: A block does not divide into pieces of that size.

        Example:
            >>> print(mesh_plan((1, 8), ("data", "model"), world_size=8).partitions["model"].split(4))
            [0, 1, 2, 3] [4, 5, 6, 7]
        """

    @abc.abstractmethod
    def orthogonal(self, within: Partition | None = None) -> Partition:
        """Return the partition whose i-th block holds the i-th ranks of all blocks.

        Local.

        Args:
            within: A coarser partition, inside each block of which this is done; None is the world in one block.

        Raises:
            ValueError: The blocks differ in size.

        Example:
            >>> nodes = mesh_plan((2, 4), ("data", "model"), world_size=8).partitions["model"]
            >>> print(nodes.split(2).orthogonal(within=nodes))
            [0, 2] [1, 3] [4, 6] [5, 7]
        """

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Text that is equal for partitions that are equal as objects, and different for different blocks."""

    def __str__(self) -> str:
        shown = [_shorten(block) for block in itertools.islice(self.blocks(), _SHOWN_BLOCKS)]
        more = [f"... ({self.num_blocks} groups)"] if self.num_blocks > _SHOWN_BLOCKS else []
        return " ".join(shown + more)


def _shorten(block: Sequence[int]) -> str:
    if len(block) <= _SHOWN_RANKS:
        return str(list(block))
    first, second, last = block[0], block[1], block[-1]
    return f"[{first}, {second}, ..., {last}; {len(block)} ranks]"


@dataclass(frozen=True)
class GridPartition(Partition):
    """Ranks laid out row by row on a grid, with blocks that extend along some of its axes.

    Axes of length 1 are dropped and neighbours of one kind are merged, so that equal partitions are equal objects.
    """

    grid: tuple[int, ...]  # lengths of the axes; the last one varies fastest with the rank
    along: tuple[bool, ...]  # whether blocks extend along an axis, for each axis
    _strides: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        strides = tuple(math.prod(self.grid[axis + 1 :]) for axis in range(len(self.grid)))
        object.__setattr__(self, "_strides", strides)

    @classmethod
    def of(cls, grid: Sequence[int], along: Iterable[int]) -> GridPartition:
        """Return the partition of a grid into blocks along the axes of these indices."""
        chosen = set(along)
        return cls._merged((length, axis in chosen) for axis, length in enumerate(grid))

    @classmethod
    def _merged(cls, axes: Iterable[tuple[int, bool]]) -> GridPartition:
        longer = (axis for axis in axes if axis[0] != 1)
        grouped = itertools.groupby(longer, key=lambda axis: axis[1])
        runs = [(math.prod(length for length, _ in run), is_along) for is_along, run in grouped]
        return cls(tuple(length for length, _ in runs), tuple(is_along for _, is_along in runs))

    @classmethod
    def whole(cls, world_size: int) -> GridPartition:
        """Return the partition that has all ranks in one block."""
        return cls.of([world_size], [0])

    @property
    def world_size(self) -> int:
        return math.prod(self.grid)

    @property
    def num_blocks(self) -> int:
        return math.prod(length for length, is_along in zip(self.grid, self.along, strict=True) if not is_along)

    @property
    def key(self) -> str:
        return "x".join(f"{length}{'*' * is_along}" for length, is_along in zip(self.grid, self.along, strict=True))

    def block_of(self, rank: int) -> tuple[int, ...]:
        offsets = [0]
        for stride, length, is_along in self._axes():
            if is_along:
                offsets = [base + step for base in offsets for step in range(0, stride * length, stride)]
        start = sum(rank // stride % length * stride for stride, length, is_along in self._axes() if not is_along)
        return tuple(start + offset for offset in offsets)

    def blocks(self) -> Iterator[tuple[int, ...]]:
        return map(self.block_of, self._starts())

    def _starts(self) -> Iterator[int]:
        """Yield the first ranks of the blocks, ascending, one at a time: they may be many."""
        axes = [(stride, length) for stride, length, kind in self._axes() if not kind]
        for index in range(self.num_blocks):
            start, left = 0, index
            for stride, length in reversed(axes):
                left, place = divmod(left, length)
                start += place * stride
            yield start

    def _axes(self) -> Iterator[tuple[int, int, bool]]:
        return zip(self._strides, self.grid, self.along, strict=True)

    def split(self, size: int) -> Partition:
        _check_split(self.world_size // self.num_blocks, size)
        axes: list[tuple[int, bool]] = []
        left = size
        for length, is_along in reversed(tuple(zip(self.grid, self.along, strict=True))):
            inner = math.gcd(left, length) if is_along else 1
            if is_along and inner not in (left, length):
                return ListedPartition(tuple(self.blocks())).split(size)
            axes += [(inner, True), (length // inner, False)]
            left //= inner
        return GridPartition._merged(reversed(axes))

    def orthogonal(self, within: Partition | None = None) -> Partition:
        if within is None:
            return GridPartition(self.grid, tuple(not is_along for is_along in self.along))
        ends = sorted(
            {1, self.world_size, *self._strides, *(within._strides if isinstance(within, GridPartition) else ())}
        )
        if not isinstance(within, GridPartition) or any(end % start for start, end in itertools.pairwise(ends)):
            return ListedPartition(tuple(self.blocks())).orthogonal(within)
        axes = [
            (end // start, within._is_along(start) and not self._is_along(start))
            for start, end in itertools.pairwise(ends)
        ]
        return GridPartition._merged(reversed(axes))

    def _is_along(self, stride: int) -> bool:
        """Return whether blocks extend along the axis that a step of this many ranks follows."""
        return any(is_along and start <= stride < start * length for start, length, is_along in self._axes())


@dataclass(frozen=True)
class ListedPartition(Partition):
    """Blocks of any sizes, given one by one."""

    listed: tuple[tuple[int, ...], ...]
    _block_by_rank: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(tuple(sorted(block)) for block in self.listed if block))
        object.__setattr__(self, "listed", ordered)
        object.__setattr__(self, "_block_by_rank", {rank: block for block in ordered for rank in block})
        if sorted(itertools.chain(*ordered)) != list(range(self.world_size)):
            raise ValueError(
                f"blocks must hold every rank from 0 to {self.world_size - 1} once, got {ordered}. List each rank in "
                "one block."
            )

    @property
    def world_size(self) -> int:
        return sum(map(len, self.listed))

    @property
    def num_blocks(self) -> int:
        return len(self.listed)

    @property
    def key(self) -> str:
        return " ".join(str(list(block)) for block in self.listed)

    def block_of(self, rank: int) -> tuple[int, ...]:
        return self._block_by_rank[rank]

    def blocks(self) -> Iterator[tuple[int, ...]]:
        return iter(self.listed)

    def split(self, size: int) -> ListedPartition:
        for block in self.listed:
            _check_split(len(block), size)
        starts = [(block, start) for block in self.listed for start in range(0, len(block), size)]
        return ListedPartition(tuple(block[start : start + size] for block, start in starts))

    def orthogonal(self, within: Partition | None = None) -> ListedPartition:
        if within is not None:
            parts: defaultdict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
            for block in self.listed:
                parts[within.block_of(block[0])].append(block)
            return ListedPartition(tuple(itertools.chain(*(_across(part) for part in parts.values()))))
        return ListedPartition(_across(self.listed))


def _across(blocks: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    sizes = sorted({len(block) for block in blocks})
    if len(sizes) > 1:
        raise ValueError(
            f"groups must be equal in size to have orthogonal groups, got sizes {sizes}. Use groups of one size."
        )
    return tuple(zip(*blocks, strict=True))


def _check_split(block_size: int, size: int) -> None:
    if not is_whole_number(size) or size < 1 or block_size % size:
        raise ValueError(
            f"size must be a divisor of the parent group's size {block_size}, got {size!r}. Choose another size."
        )


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
        axes: Lengths of a mesh's axes, or of a tree's leaves, in their order.

    Example:
        >>> plan = mesh_plan((2, 3), ("data", "model"), world_size=6)
        >>> plan.partitions["data"].block_of(4)
        (1, 4)
    """

    partitions: dict[str, Partition]
    later: dict[str, Partition] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hash that is equal on two ranks exactly if they plan the same axes, and the same groups in whatever order."""
        lines = sorted(f"{name!r} {partition.key}" for name, partition in self._all.items())
        lines += [f"{name!r}={length}" for name, length in self.axes.items()]
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
        TypeError: ``mesh_shape`` or ``mesh_dim_names`` is not a sequence, or is a string.

    Example:
        >>> print(mesh_plan((-1, 3), ("data", "model"), world_size=6))
        data: [0, 3] [1, 4] [2, 5]
        model: [0, 1, 2] [3, 4, 5]
    """
    shape = resolve_mesh_shape(mesh_shape, mesh_dim_names, world_size)
    partitions: dict[str, Partition] = {
        name: GridPartition.of(shape, [axis]) for axis, name in enumerate(mesh_dim_names)
    }
    return Plan(partitions, axes=dict(zip(mesh_dim_names, shape, strict=True)))


def resolve_mesh_shape(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], world_size: int) -> tuple[int, ...]:
    """Return the shape of a mesh with its -1 replaced, of as many ranks as the world."""
    for argument, given, of in (("mesh_shape", mesh_shape, "lengths"), ("mesh_dim_names", mesh_dim_names, "names")):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"{argument} must be a sequence of {of}, got {given!r}. Pass a tuple of {of}.")
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
                f"the root of the tree must have the world size {world_size}, got {config.root.size!r}. Set it, or "
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
    if not all(map(is_whole_number, shape)):
        raise ValueError(f"the leaves of the tree must have whole numbers of ranks, got {sizes}. Set integers.")
    if min(shape) < 1 or math.prod(shape) != world_size:
        raise ValueError(
            f"the leaves of the tree must multiply to the world size {world_size}, got {config}. "
            f"{_remedy(shape, leaves, world_size)}."
        )
    for node in [config.root, *config.nodes_below_root()]:
        size = math.prod(sizes[leaf] or 1 for leaf in config.leaves_below(node.name))
        if node.size not in (None, size):
            raise ValueError(
                f"the size of group {node.name!r} must be the product {size} of its leaves, got {node.size!r}. "
                "Call update_parent_sizes()."
            )
    nodes = config.nodes_below_root()
    axes = {node.name: [leaves.index(leaf) for leaf in config.leaves_below(node.name)] for node in nodes}
    partitions: dict[str, Partition] = {name: GridPartition.of(shape, along) for name, along in axes.items()}
    return Plan(partitions, axes=dict(zip(leaves, shape, strict=True)))


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
