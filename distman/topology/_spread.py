"""How groups lie on nodes that hold equally many consecutive ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from distman.topology._partition import Partition


@dataclass(frozen=True)
class Spread:
    """Over how many nodes the groups of a name extend.

    Attributes:
        num_groups: Number of groups.
        num_on_one_node: Number of those that stay on one node.
        min_nodes: Number of nodes of a group that extends over fewest.
        max_nodes: Number of nodes of a group that extends over most.

    Example:
        >>> spread_over_nodes(GridPartition.whole(8).split(2), ranks_per_node=4).is_on_one_node
        True
    """

    num_groups: int
    num_on_one_node: int
    min_nodes: int
    max_nodes: int

    @property
    def is_on_one_node(self) -> bool:
        """Whether every group stays on one node."""
        return self.max_nodes == 1


def spread_over_nodes(partition: Partition, ranks_per_node: int) -> Spread:
    """Return over how many nodes the blocks of a partition extend.

    Local.

    Args:
        partition: The groups of a name.
        ranks_per_node: Number of consecutive ranks on each node; the last node may hold fewer.

    Raises:
        ValueError: There would be no rank on a node.

    Example:
        >>> spread_over_nodes(GridPartition.whole(8).split(4), ranks_per_node=2)
        Spread(num_groups=2, num_on_one_node=0, min_nodes=2, max_nodes=2)
    """
    if ranks_per_node < 1:
        raise ValueError(
            f"ranks_per_node must be at least 1, got {ranks_per_node}. Pass the number of ranks on each host."
        )
    counts = Counter(len({rank // ranks_per_node for rank in block}) for block in partition.blocks())
    return Spread(partition.num_blocks, counts[1], min(counts), max(counts))
