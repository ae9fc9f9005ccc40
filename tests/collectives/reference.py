"""The oracle of the collectives: the same computation on one process, which holds the tensors of all ranks."""

import functools
import inspect

import torch

from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region

LAYOUTS = ["even", "uneven", "empty"]


def in_one_job(**values):
    """Let a test go through the values of an argument in one job, instead of one for each; an error names the value."""
    ((name, listed),) = values.items()

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            for value in listed:
                try:
                    test(*args, **kwargs, **{name: value})
                except BaseException as error:
                    error.add_note(f"{name}: {value}")
                    raise

        signature = inspect.signature(test)
        others = [one for one in signature.parameters.values() if one.name != name]
        run.__signature__ = signature.replace(parameters=others)
        return run

    return decorate


def sizes_of(layout, world_size):
    """Lengths of the shards of all ranks."""
    return {"even": [2, 2, 2, 2], "uneven": [3, 1, 4, 2], "empty": [0, 1, 5, 2]}[layout][:world_size]


def random_tensor(*shape, dtype=torch.float64, seed=0):
    """A tensor that is the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)  # sums of few are exact
    return torch.randn(shape, generator=generator, dtype=dtype)


def strided(tensor):
    """An equal tensor that is not contiguous."""
    wide = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)
    return wide[..., 0]


def check_against_one_process(operation, reference, inputs, rank, weights):
    """Compare result and gradient of this rank with those of one process that has all inputs.

    Args:
        operation: From this rank's tensor to its result; collective.
        reference: From the tensors of all ranks to the results of all ranks.
        inputs: The tensors of all ranks.
        rank: This rank.
        weights: From a rank and its result to the weights of that rank's loss.
    """
    mine = inputs[rank].detach().clone().requires_grad_()
    before = mine.detach().clone()
    result = operation(mine)
    own_weights = weights(rank, result.detach())
    kept = own_weights.clone()
    (result * own_weights).sum().abs().backward()
    assert torch.equal(mine.detach(), before)
    assert torch.equal(own_weights, kept)

    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    expected = reference(leaves)
    sum((one * weights(index, one.detach())).sum().abs() for index, one in enumerate(expected)).backward()
    assert result.shape == expected[rank].shape
    torch.testing.assert_close(result, expected[rank])
    expected_grad = leaves[rank].grad if leaves[rank].grad is not None else torch.zeros_like(leaves[rank])
    torch.testing.assert_close(mine.grad, expected_grad)


def different_on_each(rank, result):
    return random_tensor(*result.shape, dtype=result.dtype, seed=100 + rank)


def replicated(_, result):
    return random_tensor(*result.shape, dtype=result.dtype, seed=100)


def on_the_last_only(world_size):
    def weights(rank, result):
        return random_tensor(*result.shape, dtype=result.dtype, seed=100) * (rank == world_size - 1)

    return weights


def losses(world_size):
    """How the loss may lie on the ranks."""
    return [different_on_each, replicated, on_the_last_only(world_size)]


def check_gradients_numerically(operation, inputs, rank, *, twice=True):
    """Apply gradcheck, and gradgradcheck, to an operation as a function of the tensors of all ranks.

    Every rank holds all inputs, puts in its own, and adds up fixed projections of all results. The Jacobians are
    compared in a random direction, which takes few calls.
    """
    full = torch.cat([one.reshape(-1) for one in inputs]).requires_grad_()
    lengths = [one.numel() for one in inputs]

    def function(everything):
        mine = copy_to_parallel_region(everything).split(lengths)[rank].view(inputs[rank].shape)
        result = operation(mine).reshape(-1)
        projection = random_tensor(2, result.numel(), dtype=result.dtype, seed=rank)
        return reduce_from_parallel_region(projection @ result)

    assert torch.autograd.gradcheck(function, full, fast_mode=True)
    if twice:
        assert torch.autograd.gradgradcheck(function, full, fast_mode=True)
