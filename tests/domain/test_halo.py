import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distman import DistributedManager, JobFailed, PlanMismatchError
from distman.collectives import all_gather_objects, all_gather_v
from distman.domain import halo_exchange, halo_reduce
from distman.testing import kill_rank, ranks
from tests.collectives.reference import (
    check_against_one_process,
    check_gradients_numerically,
    different_on_each,
    random_tensor,
    strided,
)
from tests.domain.reference import BOUNDARIES, cut, drawer, with_halo

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
NUM_DRAWN = 16  # test_plans.py draws more, without processes


def drawn_case(draw, world_size):
    """Return dim, sizes, halo and boundary; halos may be wider than shards, and shards empty."""
    length = draw.randint(1, 9)
    boundary = draw.choice(BOUNDARIES)
    most = {"reflect": length - 1, "circular": length}.get(boundary, 9)
    halo = draw.randint(0, min(3, most)), draw.randint(0, most)
    return draw.choice([0, 1, -1]), cut(length, world_size, draw), halo, boundary


def shards_of(full, sizes, dim):
    return list(full.split(sizes, dim))


def check_drawn_case(rank, world_size, seed):
    draw = drawer(seed, world_size)
    dim, sizes, halo, boundary = drawn_case(draw, world_size)
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)
    dtype = draw.choice([torch.float64, torch.complex128])
    inputs = shards_of(random_tensor(*shape, dtype=dtype, seed=seed), sizes, dim)
    given = draw.choice([sizes, None])

    def exchanged(shard):
        return halo_exchange(shard, halo, dim, boundary=boundary, sizes=given)

    def reference(shards):
        full = torch.cat(shards, dim)
        return [with_halo(full, dim, sizes, one, halo, boundary) for one in range(world_size)]

    check_against_one_process(exchanged, reference, inputs, rank, different_on_each)

    padded = [random_tensor(*one.shape, dtype=dtype, seed=seed + 1 + at) for at, one in enumerate(reference(inputs))]

    def reduced(tensor):
        listed = sizes if boundary == "none" else given
        return halo_reduce(tensor, halo, dim, boundary=boundary, sizes=listed)

    def adjoint(windows):
        full = torch.zeros(shape, dtype=dtype).requires_grad_()
        results = [with_halo(full, dim, sizes, one, halo, boundary) for one in range(world_size)]
        # Conjugated twice: the gradient is the conjugate of what the adjoint of a real matrix is.
        (total,) = torch.autograd.grad(results, full, windows, create_graph=True)
        return shards_of(total, sizes, dim)

    check_against_one_process(reduced, adjoint, padded, rank, different_on_each)


@ranks(1, 2, 3, 4)
def test_equals_padding_on_one_process(rank, world_size):
    for seed in range(NUM_DRAWN):
        check_drawn_case(rank, world_size, seed)


@ranks(3)
def test_every_dtype(rank):
    sizes = [2, 0, 3]
    for dtype, boundary in itertools.product(DTYPES, BOUNDARIES):
        full = random_tensor(2, 5, dtype=dtype)
        mine = strided(shards_of(full, sizes, 1)[rank])
        result = halo_exchange(mine, (2, 1), 1, boundary=boundary)
        assert torch.equal(result, with_halo(full, 1, sizes, rank, (2, 1), boundary))
        back = halo_reduce(torch.ones_like(result), (2, 1), 1, boundary=boundary, sizes=sizes)
        counts = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
        total = sum(with_halo(counts, 1, sizes, one, (2, 1), boundary).sum() for one in range(3))
        total.backward()
        assert torch.equal(back, shards_of(counts.grad, sizes, 1)[rank].to(dtype))


@ranks(4)
def test_two_dims_with_corners(rank):
    manager = DistributedManager()
    manager.initialize_mesh((2, 2), ("rows", "columns"))
    sizes, halos = [[3, 1], [0, 4]], [(1, 2), 1]
    full = random_tensor(2, 4, 4)
    row, column = divmod(rank, 2)
    for boundary in BOUNDARIES:
        mine = full.split(sizes[0], 1)[row].split(sizes[1], 2)[column].clone().requires_grad_()
        options = {"boundary": boundary, "group": ("rows", "columns")}
        result = halo_exchange(mine, halos, (1, -1), **options)
        tall = with_halo(full, 1, sizes[0], row, (1, 2), boundary)
        assert torch.equal(result, with_halo(tall, 2, sizes[1], column, (1, 1), boundary))

        weights = random_tensor(*result.shape, seed=rank)
        (result * weights).sum().backward()
        back = halo_reduce(weights, halos, (1, -1), sizes=sizes, **options)
        torch.testing.assert_close(mine.grad, back)


@ranks(2, 3)
def test_gradcheck(rank, world_size):
    sizes = [3, 0, 2][:world_size]
    inputs = [random_tensor(2, size, seed=at) for at, size in enumerate(sizes)]
    for boundary in BOUNDARIES:

        def there_and_back(shard, boundary=boundary):
            halo = halo_exchange(shard, (1, 2), 1, boundary=boundary, sizes=sizes)
            return halo_reduce(halo * halo, (1, 2), 1, boundary=boundary, sizes=sizes)

        check_gradients_numerically(there_and_back, inputs, rank)


@ranks(2)
def test_activation_checkpointing(rank):
    mine = random_tensor(3, 4, seed=rank).requires_grad_()
    plain = halo_exchange(mine.sin(), 1, 1).cos()
    expected = torch.autograd.grad(plain.sum(), mine)
    again = checkpoint(lambda shard: halo_exchange(shard.sin(), 1, 1).cos(), mine, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), mine)[0], expected[0])


@pytest.mark.gloo_only("what a graph leaves out does not depend on the backend")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The .grad attribute")
@ranks(2)
def test_compiled_with_a_graph_break(rank):
    torch._dynamo.reset()
    mine = random_tensor(3, 4, seed=rank).requires_grad_()

    def computed(shard):
        return halo_reduce(halo_exchange(shard.sin(), 1, 1, boundary="reflect").cos(), 1, 1, boundary="reflect")

    results = [function(mine) for function in (computed, torch.compile(computed, backend="aot_eager"))]
    assert torch.equal(*results)
    assert torch.equal(*[torch.autograd.grad(one.sum(), mine)[0] for one in results])


@ranks(1, 2)
def test_keeps_what_it_was_given(world_size):
    mine = torch.ones(2, 3)
    result = halo_exchange(mine, 0, 1)
    result.zero_()
    assert torch.equal(mine, torch.ones(2, 3))
    assert torch.equal(all_gather_v(mine), torch.ones(2 * world_size, 3))


def watch(monkeypatch):
    """Start a job whose ranks hear of each other."""
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize(timeout=60)


MISUSE = {
    "negative": ({"halo": -1}, "halo must be a number of entries, 0 or more, or two of them, got -1"),
    "three": ({"halo": (1, 1, 1)}, r"halo must be a number of entries, 0 or more, or two of them, got \(1, 1, 1\)"),
    "boundary": ({"boundary": "constant"}, "boundary must be one of zeros, circular, .* got 'constant'"),
    "dim": ({"dim": 2}, "dim must be between -2 and 1"),
    "sizes": ({"sizes": [3]}, "sizes must hold one number"),
    "length": ({"sizes": [3, 5]}, "must have length"),
    "reflect": ({"halo": 8, "boundary": "reflect"}, "halo must be at most 7 where a tensor of length 8 along dim 1"),
    "circular": ({"halo": (0, 9), "boundary": "circular"}, "halo must be at most 8"),
    "twice": ({"dim": (1, -1), "group": ("world", "world")}, "group must be another one for each of the dims"),
    "fewer": ({"dim": (0, 1), "boundary": ["zeros"]}, "boundary must have one entry for each of the 2 dims"),
}


@ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks():
    for name, (arguments, message) in MISUSE.items():
        with pytest.raises(ValueError, match=message):
            halo_exchange(torch.ones(2, 4), **{"halo": 1, "dim": 1, **arguments})
        assert all_gather_objects(name) == [name] * 2  # the group is as good as before


@ranks(2)
def test_halos_that_do_not_fit_their_tensor():
    with pytest.raises(ValueError, match="tensor must hold its halos"):
        halo_reduce(torch.ones(2, 1), 1, 1)
    with pytest.raises(ValueError, match="tensor must have length 5 along dim 1, that of a shard of 3 with its halos"):
        halo_reduce(torch.ones(2, 4), 1, 1, sizes=[3, 3])
    with pytest.raises(ValueError, match="sizes must be given"):
        halo_reduce(torch.ones(2, 4), 1, 1, boundary="none")
    assert torch.equal(halo_reduce(torch.ones(3), 1, 0), torch.tensor([2.0]))  # the group is as good as before


@pytest.mark.gloo_only("a rank of NCCL goes on while its GPU waits")
@ranks(3, manager=False)
def test_a_tensor_that_cannot_travel_is_refused_on_all(monkeypatch, rank):
    watch(monkeypatch)
    shard = torch.ones(4).to_sparse() if rank == 1 else torch.ones(4)
    with pytest.raises((ValueError, PlanMismatchError), match="sparse"):
        halo_exchange(shard, 1, 0)
    with pytest.raises((ValueError, PlanMismatchError), match="sparse"):
        halo_exchange(shard, 1, 0, sizes=[4, 4, 4], boundary="circular")
    assert all_gather_objects(rank) == [0, 1, 2]


@pytest.mark.gloo_only("a rank of NCCL goes on while its GPU waits")
@ranks(2, manager=False)
def test_shards_and_calls_that_differ_are_refused(monkeypatch, rank):
    watch(monkeypatch)
    with pytest.raises(ValueError, match="must be equal"):
        halo_exchange(torch.ones(2 + rank, 3), 1, 1)
    with pytest.raises(PlanMismatchError):
        halo_exchange(torch.ones(2, 3), 1 + rank, 1)


@pytest.mark.gloo_only("a rank of NCCL goes on while its GPU waits")
@ranks(3, manager=False, dies=[2])
def test_a_dead_neighbour_ends_the_wait(monkeypatch):
    watch(monkeypatch)
    kill_rank(2)
    with pytest.raises(JobFailed, match="rank 2"):
        halo_exchange(torch.ones(3), 1, 0, boundary="circular", sizes=[3, 3, 3])
