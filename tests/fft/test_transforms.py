import itertools
import random
import subprocess
import sys
import warnings

import pytest
import torch

from distman import DistributedManager, fft, split_sizes
from distman.errors import PlanMismatchError, UndefinedGroupError
from distman.fft import _blocks
from distman.testing import ranks
from tests.collectives.reference import check_gradients_numerically, in_one_job, random_tensor, strided

KINDS = ["fftn", "ifftn", "rfftn", "irfftn"]
NORMS = ["backward", "ortho", "forward"]
SHAPES = [(8, 8), (7, 5), (13, 17), (1, 9), (9, 1), (4, 6, 5)]


def make_input(kind, *shape, dtype=torch.float64):
    """The full tensor, equal on all ranks."""
    is_real = kind.startswith("rfft")
    return random_tensor(*shape, dtype=dtype if is_real else dtype.to_complex())


def shard_of(full, dim, rank, sizes):
    return full.split(sizes, dim)[rank]


def check_against_one_process(kind, full, s, dims, norm, *, shard_dim, out_dim, rank, sizes=None, out_sizes=None):
    """Compare result and gradient of this rank with those of torch.fft on the full tensor, to 1e-10."""
    world_size = DistributedManager().world_size
    leaf = full.clone().requires_grad_()
    expected = getattr(torch.fft, kind)(leaf, s, dims, norm)
    weights = random_tensor(*expected.shape, dtype=expected.dtype, seed=1)
    (expected_grad,) = torch.autograd.grad(expected, leaf, weights)

    in_shards = sizes or split_sizes(full.shape[shard_dim], world_size)
    out_shards = out_sizes or split_sizes(expected.shape[out_dim], world_size)
    mine = shard_of(full, shard_dim, rank, in_shards).detach().clone().requires_grad_()
    kept = mine.detach().clone()
    result = getattr(fft, kind)(
        mine, s, dims, norm, shard_dim=shard_dim, out_dim=out_dim, sizes=sizes, out_sizes=out_sizes
    )
    (grad,) = torch.autograd.grad(result, mine, shard_of(weights, out_dim, rank, out_shards))
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(result, shard_of(expected.detach(), out_dim, rank, out_shards), **close)
    torch.testing.assert_close(grad, shard_of(expected_grad, shard_dim, rank, in_shards), **close)
    assert torch.equal(mine.detach(), kept)


def other_lengths(shape):
    """Lengths of which some fill up and some cut off."""
    return [length + 2 - 3 * (index % 2) * (length > 4) for index, length in enumerate(shape)]


@ranks(1, 2, 3)
@in_one_job(kind=KINDS)
def test_result_and_gradient_equal_one_process_in_every_layout(rank, world_size, kind):
    norms = itertools.cycle(NORMS)
    for shape in SHAPES:
        full, dims = make_input(kind, *shape), range(len(shape))
        for s, shard_dim, out_dim in itertools.product([None, other_lengths(shape)], dims, dims):
            if kind == "irfftn" and s is None and shape[-1] == 1:
                continue  # no points
            sizes = split_sizes(shape[shard_dim], world_size) if s is None else None
            check_against_one_process(
                kind, full, s, list(dims), next(norms), shard_dim=shard_dim, out_dim=out_dim, rank=rank, sizes=sizes
            )


@ranks(3)
def test_a_tensor_of_many_blocks_equals_one_process(monkeypatch, rank):
    for kind in KINDS:
        monkeypatch.setattr(_blocks, "_BLOCK_BYTES", 300)
        full = make_input(kind, 3, 5, 2, 12, 4)
        for dims in ([1, 3], [3, 1], [1, 4, 3]):
            for shard_dim, out_dim in itertools.product(dims, dims):
                check_against_one_process(
                    kind, full, None, dims, "ortho", shard_dim=shard_dim, out_dim=out_dim, rank=rank
                )


def draw_sizes(draw, length, world_size):
    """Lengths of shards that may be empty."""
    cuts = sorted(draw.randint(0, length) for _ in range(world_size - 1))
    return [end - begin for begin, end in itertools.pairwise([0, *cuts, length])]


@ranks(3, 4)
def test_real_data_of_drawn_lengths_and_shards_in_small_blocks(monkeypatch, rank, world_size):
    for seed in range(40):
        draw = random.Random(seed)  # noqa: S311 - not for secrets
        monkeypatch.setattr(_blocks, "_BLOCK_BYTES", draw.choice([50, 200, 2**19]))
        kind = draw.choice(["rfftn", "irfftn"])
        shape = [draw.randint(1 + (kind == "irfftn"), 9) for _ in range(draw.choice([2, 2, 3]))]
        last = shape[-1] // 2 + 1 if kind == "rfftn" else 2 * (shape[-1] - 1)
        shard_dim, out_dim = draw.choice([(-1, 0), (0, -1), (-1, -2), (-2, -1)])
        check_against_one_process(
            kind,
            make_input(kind, *shape),
            None,
            list(range(len(shape))),
            draw.choice(NORMS),
            shard_dim=shard_dim,
            out_dim=out_dim,
            rank=rank,
            sizes=draw_sizes(draw, shape[shard_dim], world_size),
            out_sizes=draw_sizes(draw, [*shape[:-1], last][out_dim], world_size),
        )


@ranks(2, 4)
def test_uneven_and_empty_shards_in_and_out(rank, world_size):
    for kind in KINDS:
        full = make_input(kind, 7, 9)
        for shard_dim, out_dim in itertools.product([0, 1], [0, 1]):
            sizes = {2: ([1, 6], [9, 0]), 4: ([0, 4, 1, 2], [3, 0, 0, 6])}[world_size][shard_dim]
            length = {"rfftn": [7, 5], "irfftn": [7, 16]}.get(kind, [7, 9])[out_dim]
            out_sizes = [0] * (world_size - 2) + [length - 2, 2]
            check_against_one_process(
                kind,
                full,
                None,
                [0, 1],
                "backward",
                shard_dim=shard_dim,
                out_dim=out_dim,
                rank=rank,
                sizes=sizes,
                out_sizes=out_sizes,
            )


@ranks(3)
@in_one_job(kind=KINDS)
def test_gradcheck_twice(rank, world_size, kind):
    for shard_dim, out_dim in [(0, 1), (1, 0)]:
        shards = make_input(kind, 3, 2).split(split_sizes([3, 2][shard_dim], world_size), shard_dim)
        inputs = [torch.view_as_real(one) if one.is_complex() else one for one in shards]

        def function(mine, shard_dim=shard_dim, out_dim=out_dim):
            tensor = mine if kind == "rfftn" else torch.view_as_complex(mine.contiguous())
            result = getattr(fft, kind)(tensor, shard_dim=shard_dim, out_dim=out_dim)
            return torch.view_as_real(result) if result.is_complex() else result

        check_gradients_numerically(function, inputs, rank)


@ranks(2)
def test_dtypes_strides_and_conjugates(rank):
    for kind, dtype in itertools.product(KINDS, [torch.float32, torch.float64]):
        full = make_input(kind, 6, 2, 8, dtype=dtype)
        expected = getattr(torch.fft, kind)(full, None, (0, 2))
        mine = shard_of(full, 0, rank, [3, 3])
        shapes = [strided(mine), mine.transpose(0, 2).contiguous().transpose(0, 2)]
        if mine.is_complex():
            shapes.append(mine.conj().resolve_conj().conj())
        for one in shapes:
            options = {"shard_dim": 0, "out_dim": 2}
            torch.testing.assert_close(
                getattr(fft, kind)(one, None, (0, 2), **options),
                shard_of(expected, 2, rank, split_sizes(expected.shape[2], 2)),
            )


@ranks(1, 3)
def test_a_batch_of_nothing_has_a_spectrum_and_a_gradient_of_nothing(rank):
    for kind in KINDS:
        full = make_input(kind, 0, 6, 9)
        mine = shard_of(full, 1, rank, split_sizes(6, DistributedManager().world_size)).clone().requires_grad_()
        result = getattr(fft, kind)(mine, None, (1, 2), shard_dim=1)
        result.abs().sum().backward()
        assert result.numel() == 0
        assert mine.grad.shape == mine.shape


@ranks(2)
def test_integers_are_transformed_as_floats_of_the_default_dtype(rank):
    full = torch.arange(24).view(4, 6)
    result = fft.rfft2(shard_of(full, 0, rank, [2, 2]))
    torch.testing.assert_close(result, shard_of(torch.fft.rfft2(full), 1, rank, [2, 2]))


@ranks(1, 3)
def test_a_large_transform_in_single_precision(rank, world_size):
    full = random_tensor(721, 1440, dtype=torch.float32)
    expected = torch.fft.rfft2(full, norm="ortho")
    scale = expected.abs().max()
    for shard_dim, out_dim in [(0, 1), (1, 0)]:
        mine = shard_of(full, shard_dim, rank, split_sizes(full.shape[shard_dim], world_size))
        half = fft.rfft2(mine, norm="ortho", shard_dim=shard_dim, out_dim=out_dim)
        wanted = shard_of(expected, out_dim, rank, split_sizes(expected.shape[out_dim], world_size))
        assert (half - wanted).abs().max() < 1e-5 * scale
        back = fft.irfft2(half, full.shape, norm="ortho", shard_dim=out_dim, out_dim=shard_dim)
        assert (back - mine).abs().max() < 1e-5 * full.abs().max()


@ranks(1, 3)
def test_the_inverse_undoes_the_transform_with_nothing_but_lengths(rank, world_size):
    for kind, dims in itertools.product(["fft2", "rfft2"], [(-2, -1), (0, 2), (3, 1)]):
        full = make_input(kind, 5, 4, 6, 7)
        mine = shard_of(full, dims[0], rank, split_sizes(full.shape[dims[0]], world_size))
        spectrum = getattr(fft, kind)(mine, dim=dims)
        inverse = {"fft2": fft.ifft2, "rfft2": fft.irfft2}[kind]
        lengths = [full.shape[dim] for dim in dims]
        torch.testing.assert_close(inverse(spectrum, lengths, dims), mine)


@ranks(2)
def test_dim_defaults_to_the_dims_of_s_or_to_all(rank):
    full = make_input("fftn", 4, 6, 3)
    mine = shard_of(full, 0, rank, [2, 2])
    torch.testing.assert_close(fft.fftn(mine), shard_of(torch.fft.fftn(full), 2, rank, [2, 1]))
    mine = shard_of(full, 1, rank, [3, 3])
    torch.testing.assert_close(fft.fftn(mine, [8, -1]), shard_of(torch.fft.fftn(full, [8, -1]), 2, rank, [2, 1]))


@ranks(1, 2)
def test_no_length_is_the_one_that_is_there(rank, world_size):
    for kind in KINDS:
        full = make_input(kind, 4, 5)
        mine = shard_of(full, 0, rank, split_sizes(4, world_size))
        for s, expected in [((None, None), (-1, -1)), ((None, 6), (-1, 6)), ((3, None), (3, -1))]:
            wanted = getattr(torch.fft, kind)(full, expected)
            result = getattr(fft, kind)(mine, s, shard_dim=0, out_dim=1)
            torch.testing.assert_close(result, shard_of(wanted, 1, rank, split_sizes(wanted.shape[1], world_size)))


@ranks(1, 2, 4)
def test_the_layout_of_model_parallel_networks(rank, world_size):
    manager = DistributedManager()
    with pytest.raises(UndefinedGroupError, match="spatial_parallel"):
        fft.DistributedRFFT2.apply(torch.ones(4, 4))
    manager.create_process_subgroup("spatial_parallel", world_size)
    full = make_input("rfft2", 2, 3, 9, 14)
    columns, rows = split_sizes(14, world_size), split_sizes(8, world_size)
    for norm in NORMS:
        leaf = full.clone().requires_grad_()
        expected = torch.fft.rfft2(leaf, (8, 14), norm=norm)
        mine = shard_of(full, 3, rank, columns).clone().requires_grad_()
        spectrum = fft.DistributedRFFT2.apply(mine, (8, 14), (-2, -1), norm)
        torch.testing.assert_close(spectrum, shard_of(expected, 2, rank, rows))
        back = fft.DistributedIRFFT2.apply(spectrum, (8, 14), (-2, -1), norm)
        torch.testing.assert_close(back, shard_of(full[:, :, :8], 3, rank, columns))
        back.square().sum().backward()
        torch.fft.irfft2(expected, (8, 14), norm=norm).square().sum().backward()
        torch.testing.assert_close(mine.grad, shard_of(leaf.grad, 3, rank, columns))


@ranks(2)
def test_autocast_computes_in_single_precision(rank):
    full = random_tensor(6, 8, dtype=torch.bfloat16)
    mine = shard_of(full, 0, rank, [3, 3])
    with pytest.raises(ValueError, match=r"must be of 32 or 64 bits, got torch\.bfloat16"):
        fft.rfft2(mine)
    with torch.autocast("cpu", torch.bfloat16):
        result = fft.rfft2(mine)
    assert result.dtype == torch.complex64
    torch.testing.assert_close(result, shard_of(torch.fft.rfft2(full.float()), 1, rank, [3, 2]))


@ranks(2)
def test_no_graph_under_no_grad():
    mine = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        assert not fft.rfft2(mine).requires_grad
    assert fft.rfft2(mine).requires_grad


class Filter(torch.nn.Module):
    """Multiplies the spectrum by learned numbers, shards along rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(random_tensor(6, 5, seed=3))

    def forward(self, rows):
        spectrum = fft.rfft2(rows, out_dim=-2, group="spatial_parallel")
        manager = DistributedManager()
        sizes = split_sizes(6, manager.group_size("spatial_parallel"))
        weight = self.weight.split(sizes)[manager.group_rank("spatial_parallel")]
        return fft.irfft2(spectrum * weight, (6, 8), shard_dim=-2, out_dim=-2, group="spatial_parallel")


@ranks(4)
def test_inside_ddp_over_the_orthogonal_group():
    manager = DistributedManager()
    manager.create_process_subgroup("spatial_parallel", 2)
    manager.create_orthogonal_process_group("data_parallel", "spatial_parallel")
    samples = random_tensor(2, 6, 8)
    model = torch.nn.parallel.DistributedDataParallel(Filter(), process_group=manager.group("data_parallel"))
    row, column = manager.group_rank("data_parallel"), manager.group_rank("spatial_parallel")
    output = model(samples[row, 3 * column : 3 * column + 3])
    output.pow(3).sum().backward()

    weight = model.module.weight.detach().clone().requires_grad_()
    expected = torch.fft.irfft2(torch.fft.rfft2(samples) * weight, (6, 8))
    torch.testing.assert_close(output, expected[row, 3 * column : 3 * column + 3])
    expected.pow(3).sum().div(2).backward()  # DDP takes the mean over its ranks
    part = slice(3 * column, 3 * column + 3)
    torch.testing.assert_close(model.module.weight.grad[part], weight.grad[part])


WRONG = [
    ({"dim": (0,)}, "dim must hold at least two different dims, .* Functions like fft and rfft transform a single"),
    ({"dim": (0, -2)}, "at least two different dims"),
    ({"dim": (0, 2)}, "dim must be between -2 and 1"),
    ({"s": (4,), "dim": (0, 1)}, "s must hold one length for each of 2 dims"),
    ({"s": (4, 0)}, "at least one point along each of its dims, got"),
    ({"norm": "orthogonal"}, "norm must be one of backward, ortho, forward"),
    ({"s": 4}, "s must be a sequence of integers, got 4"),
    ({"s": (4, None, 6), "dim": (0, 1)}, "s must hold one length for each of 2 dims"),
    ({"s": (4.0, 6.0)}, r"s must be a sequence of integers, got \(4\.0, 6\.0\)"),
    ({"dim": 0}, "dim must be a sequence of integers, got 0"),
    ({"shard_dim": 3}, "shard_dim must be between -2 and 1"),
    ({"out_dim": "0"}, "out_dim must be between -2 and 1 for a tensor of 2 dims, got '0'"),
    ({"sizes": (1, 3)}, "must have length sizes"),
    ({"out_sizes": (1, 1)}, "out_sizes must add up to the length 3"),
    ({"out_sizes": (3,)}, "out_sizes must hold one number"),
]


@ranks(2)
def test_wrong_arguments_are_one_sentence():
    for arguments, message in WRONG:
        with pytest.raises(ValueError, match=message):
            fft.rfft2(torch.ones(2, 4), **arguments)


@ranks(2)
def test_a_dim_that_is_not_transformed_cannot_be_the_sharded_one():
    with pytest.raises(ValueError, match=r"shard_dim must be one of the transformed dims \(1, 2\), got 0"):
        fft.rfft2(torch.ones(2, 4, 4), shard_dim=0)


@ranks(2)
def test_complex_data_has_no_half_spectrum():
    with pytest.raises(ValueError, match=r"the tensor of rfft2 must be real, got torch\.complex64\. Use fft2"):
        fft.rfft2(torch.ones(2, 4, dtype=torch.complex64))


@ranks(2)
def test_shards_that_do_not_fit_raise_on_all(rank):
    with pytest.raises(ValueError, match="the shards of rfft2 must be equal"):
        fft.rfft2(torch.ones(2, 4 + rank))


@ranks(2)
def test_the_result_may_be_changed_in_place(rank):
    for kind, shard_dim, out_dim in itertools.product(["fftn", "rfftn"], [0, 1], [0, 1]):
        full = make_input(kind, 4, 6)
        mine = shard_of(full, shard_dim, rank, split_sizes(full.shape[shard_dim], 2)).clone().requires_grad_()
        result = getattr(fft, kind)(mine, shard_dim=shard_dim, out_dim=out_dim)
        result *= 2
        result.abs().square().sum().backward()
        leaf = full.clone().requires_grad_()
        (2 * getattr(torch.fft, kind)(leaf)).abs().square().sum().backward()
        torch.testing.assert_close(
            mine.grad, shard_of(leaf.grad, shard_dim, rank, split_sizes(full.shape[shard_dim], 2))
        )


def test_the_import_does_not_load_the_compiler():
    program = "import sys, distman.fft; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@ranks(2)
def test_a_compiled_function_may_transform(rank):
    manager = DistributedManager()
    manager.create_process_subgroup("spatial_parallel", 2)
    full = make_input("rfft2", 6, 22)  # lengths that no other test has put into the cache

    @torch.compile(backend="eager")
    def filtered(tensor):
        return fft.DistributedIRFFT2.apply(fft.DistributedRFFT2.apply(2 * tensor), (6, 22)) + 1

    mine = shard_of(full, 1, rank, [11, 11]).clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch looks, and would hide it
        result = filtered(mine)
    torch.testing.assert_close(result, 2 * mine + 1)
    result.sum().backward()
    torch.testing.assert_close(mine.grad, torch.full_like(mine, 2))


@ranks(2)
def test_debug_mode_counts_dims_from_either_end(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    full = make_input("rfft2", 4, 6)
    options = [{"dim": (-2, -1), "shard_dim": -2, "norm": None}, {"dim": (0, 1), "out_dim": 1, "norm": "backward"}]
    result = fft.rfft2(full.split(2)[rank], **options[rank])
    torch.testing.assert_close(result, shard_of(torch.fft.rfft2(full), 1, rank, [2, 2]))


@ranks(2)
def test_debug_mode_lets_shards_differ_in_length(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    full = make_input("fftn", 3, 4)
    torch.testing.assert_close(
        fft.ifft2(fft.fft2(full.split([1, 2])[rank]), out_sizes=[1, 2]), full.split([1, 2])[rank]
    )


@ranks(2)
def test_debug_mode_shows_ranks_that_call_differently(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    with pytest.raises(PlanMismatchError, match="operation rfft2"):
        fft.rfft2(torch.ones(2, 4), norm=["ortho", "forward"][rank], sizes=[2, 2])


@pytest.mark.parametrize("name", ["fft", "irfft2", "rfftn"])
def test_an_argument_that_it_does_not_have_is_told_by_its_own_name(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'sharded_dim'"):
        getattr(fft, name)(torch.ones(4, 4), sharded_dim=0)
