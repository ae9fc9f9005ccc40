"""Find the clusters of data that no rank holds as a whole: k-means, with one collective in each step.

    python docs/examples/kmeans.py
    distman run -n 3 docs/examples/kmeans.py
    distman run -n 2 docs/examples/kmeans.py

Each rank keeps its part of the 1,797 digits that scikit-learn ships, 64 numbers each. What the ranks exchange is the
sum and the number of points of each cluster, however many points there are. Any number of ranks finds the same
clusters.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

from distman import DistributedManager, split_sizes
from distman.collectives import all_gather_v, fused_all_reduce


def my_points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the points and of their labels; the parts may differ in size."""
    manager = DistributedManager()
    digits = load_digits()
    sizes = split_sizes(len(digits.data), manager.world_size)
    points = torch.tensor(digits.data / 16.0, device=manager.device).split(sizes)[manager.rank]
    return points, torch.tensor(digits.target, device=manager.device).split(sizes)[manager.rank]


def first_centers(points: torch.Tensor, number: int) -> torch.Tensor:
    """Choose points far from each other: each rank proposes its farthest, and the farthest of those is taken."""
    centers = fused_all_reduce({"sum": points.sum(dim=0), "number": points.new_tensor(len(points))})
    centers = (centers["sum"] / centers["number"])[None]
    for _ in range(number):
        distances, index = torch.cdist(points, centers).amin(dim=1).max(dim=0)
        proposals = all_gather_v(torch.cat([distances[None], points[index]])[None])
        centers = torch.cat([centers, proposals[proposals[:, 0].argmax(), None, 1:]])
    return centers[1:]  # the first was the mean of all points


def step(points: torch.Tensor, centers: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Move each center to the mean of the points that are nearest to it; return also their mean squared distance."""
    distances, nearest = torch.cdist(points, centers).min(dim=1)
    sums = torch.zeros_like(centers).index_add_(0, nearest, points)
    counts = torch.bincount(nearest, minlength=len(centers)).to(points)
    total = fused_all_reduce({"sums": sums, "counts": counts, "squares": distances.square().sum()})
    is_empty = (total["counts"] == 0)[:, None]  # on no rank is a point near: such a center stays where it is
    moved = torch.where(is_empty, centers, total["sums"] / total["counts"].clamp(min=1)[:, None])
    return moved, (total["squares"] / total["counts"].sum()).item()


def purity(points: torch.Tensor, labels: torch.Tensor, centers: torch.Tensor) -> float:
    """Return the fraction of points whose digit is the most frequent one of their cluster."""
    nearest = torch.cdist(points, centers).argmin(dim=1)
    table = torch.bincount(10 * nearest + labels, minlength=10 * len(centers))
    table = fused_all_reduce(table).reshape(len(centers), 10)  # whole numbers, so the sum is exact
    return (table.amax(dim=1).sum() / table.sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Find clusters of handwritten digits.")
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="steps at most")
    options = parser.parse_args()

    manager = DistributedManager.initialize()
    points, labels = my_points()
    centers, previous = first_centers(points, options.clusters), float("inf")
    for number in range(1, options.steps + 1):
        centers, distance = step(points, centers)
        if manager.is_main:
            print(f"step {number:2d}  mean squared distance {distance:.12f}", flush=True)
        if distance >= previous:  # the same number on all ranks, so all stop together
            break
        previous = distance
    result = purity(points, labels, centers)
    if manager.is_main:
        print(f"{result:.4f} of the digits are in a cluster of their own kind")


if __name__ == "__main__":
    main()
