"""What a type checker must refuse: one mistake in each line after the comment."""

from distman import DistributedManager, on_rank, parallelize_on_gpus

manager = DistributedManager.initialize()


@on_rank(0)
def first(number: int) -> str:
    return str(number)


@parallelize_on_gpus(pass_device=False)
def double(number: float) -> float:
    return 2 * number


# mistakes
number = manager.rnk
first("one")
double("two")
manager.barrier(timeout="soon")
