"""The neural operator: on any ranks, and any mesh of them, output and gradients are those of one process."""

import random

import pytest
import torch

from distman import DistributedManager, fft
from distman.collectives import broadcast_data
from distman.errors import UndefinedGroupError
from distman.testing import ranks
from tests.collectives.reference import check_gradients_numerically, random_tensor

SPLIT = "model_parallel"


def draw_parameters(seed):
    """Sizes that need not divide each other, nor by the ranks."""
    drawn = random.Random(seed)  # noqa: S311 - sizes
    num_blocks = drawn.randint(1, 5)
    return {
        "inp_shape": (drawn.randint(1, 9), drawn.randint(1, 11)),
        "in_channels": drawn.randint(1, 4),
        "out_channels": drawn.choice([None, 1, 3]),
        "patch_size": drawn.choice([1, 2, 3, (2, 1), (1, 4)]),
        "embed_dim": num_blocks * drawn.randint(1, 3),
        "depth": drawn.randint(0, 2),
        "num_blocks": num_blocks,
        "mlp_ratio": drawn.choice([0.5, 1.3, 2.0]),
        "positions": drawn.random() < 0.7,
        "sparsity_threshold": 0.001,
    }


def make_model(parameters, **options):
    model = fft.DistributedAFNO(**parameters, **options).double()
    whole = {  # large enough for every path to matter
        name: 0.5 * random_tensor(*tensor.shape, seed=index)
        for index, (name, tensor) in enumerate(model.whole_state().items())
    }
    model.load_whole_state(whole)
    return model, whole


def one_process(parameters, whole, images, weights):
    """The same operator without any split: the groups of one process, by hand."""
    x = images.clone().requires_grad_()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    (height, width), patch = parameters["inp_shape"], parameters["patch_size"]
    p, q = (patch, patch) if isinstance(patch, int) else patch
    rows, columns = -(-height // p), -(-width // q)
    padded = torch.nn.functional.pad(x, (0, columns * q - width, 0, rows * p - height))
    embed = leaves["embed.weight"].unflatten(1, (parameters["in_channels"], p, q))
    tokens = torch.nn.functional.conv2d(padded, embed, leaves["embed.bias"], stride=(p, q)).movedim(1, -1)
    if parameters["positions"]:
        tokens = tokens + leaves["position"]
    dim, blocks = parameters["embed_dim"], parameters["num_blocks"]
    for index in range(parameters["depth"]):
        own = {
            name.removeprefix(f"blocks.{index}."): value
            for name, value in leaves.items()
            if name.startswith(f"blocks.{index}.")
        }
        mixed = torch.nn.functional.layer_norm(tokens, (dim,), own["mix.0.weight"], own["mix.0.bias"])
        modes = torch.fft.rfft2(mixed.unflatten(-1, (blocks, -1)), dim=(1, 2), norm="ortho")
        for layer, act in (
            ("first", torch.relu),
            ("second", lambda y: torch.nn.functional.softshrink(y, parameters["sparsity_threshold"])),
        ):
            weight, bias = (torch.view_as_complex(own[f"mix.1.{layer}_{kind}"]) for kind in ("weight", "bias"))
            modes = (modes.unsqueeze(-1) * weight).sum(-2) + bias
            modes = torch.complex(act(modes.real), act(modes.imag))
        tokens = tokens + torch.fft.irfft2(modes, (rows, columns), (1, 2), "ortho").flatten(-2)
        hidden = torch.nn.functional.layer_norm(tokens, (dim,), own["mlp.0.weight"], own["mlp.0.bias"])
        hidden = torch.nn.functional.gelu(hidden @ own["mlp.1.first_weight"].T + own["mlp.1.first_bias"])
        tokens = tokens + hidden @ own["mlp.1.second_weight"].T + own["mlp.1.second_bias"]
    tokens = torch.nn.functional.layer_norm(tokens, (dim,), leaves["norm.weight"], leaves["norm.bias"])
    head = leaves["head.weight"].unflatten(0, (-1, p, q)).movedim(-1, 0)
    y = torch.nn.functional.conv_transpose2d(tokens.movedim(-1, 1), head, stride=(p, q))
    y = y + leaves["head.bias"].unflatten(0, (-1, p, q)).repeat(1, rows, columns)
    y = y[:, :, :height, :width]
    (y * weights).sum().backward()
    return y.detach(), x.grad, {name: leaf.grad for name, leaf in leaves.items()}


def check(parameters, seed):
    manager = DistributedManager()
    model, whole = make_model(parameters)
    images = random_tensor(3, parameters["in_channels"], *parameters["inp_shape"], seed=seed)
    channels = parameters["out_channels"] or parameters["in_channels"]
    weights = random_tensor(3, channels, *parameters["inp_shape"], seed=seed + 1)
    expected, grad, grads = one_process(parameters, whole, images, weights)

    index = manager.group_rank("spatial_parallel") if "spatial_parallel" in manager.group_names else 0
    assert sum(model.column_sizes) == parameters["inp_shape"][1]

    def mine(tensor):
        return tensor.split(model.column_sizes, -1)[index]

    x = mine(images).clone().requires_grad_()
    y = model(x)
    (y * mine(weights)).sum().backward()
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(y, mine(expected), **close)
    torch.testing.assert_close(x.grad, mine(grad), **close)
    slices, _ = make_model(parameters)
    slices.load_whole_state(grads)
    for (name, parameter), expected_grad in zip(model.named_parameters(), slices.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_grad.detach(), **close, msg=lambda m, n=name: f"{n}: {m}")


@ranks(1, 3)
def test_output_and_gradients_equal_one_process_where_the_channels_are_split(world_size):
    DistributedManager.create_process_subgroup(SPLIT, world_size)
    for seed in range(5):
        check(draw_parameters(seed), seed)


@ranks(3, 4)
def test_and_where_the_columns_are_split_too(world_size):
    spatial = 2 if world_size == 4 else world_size
    DistributedManager().initialize_mesh((spatial, world_size // spatial), ("spatial_parallel", SPLIT))
    for seed in range(100, 105):
        check(draw_parameters(seed), seed)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 1)])
@ranks(4)
def test_ddp_over_the_samples(mesh):
    """Of two model-parallel ranks the second has no block: its weights are empty, but they are used."""
    manager = DistributedManager()
    manager.initialize_mesh(mesh, ("data_parallel", "spatial_parallel", SPLIT))
    parameters = draw_parameters(3) | {"depth": 1, "num_blocks": 1, "embed_dim": 3, "inp_shape": (5, 7)}
    model, whole = make_model(parameters)
    images = random_tensor(4, parameters["in_channels"], 5, 7)
    weights = random_tensor(4, parameters["out_channels"] or parameters["in_channels"], 5, 7, seed=1)
    _, _, grads = one_process(parameters, whole, images, weights)
    parallel = manager.wrap_ddp(model, process_group=manager.group("data_parallel"))
    index = manager.group_rank("spatial_parallel")
    mine, own_weights = (
        one.split(model.column_sizes, -1)[index].chunk(2)[manager.group_rank("data_parallel")]
        for one in (images, weights)
    )
    (parallel(mine) * own_weights).sum().backward()
    slices, _ = make_model(parameters)
    slices.load_whole_state(grads)
    for (name, parameter), expected in zip(model.named_parameters(), slices.parameters(), strict=True):
        torch.testing.assert_close(2 * parameter.grad, expected.detach(), msg=lambda m, n=name: f"{n}: {m}")


@ranks(2)
def test_numerical_gradients(rank):
    DistributedManager().initialize_mesh((2, 1), ("spatial_parallel", SPLIT))
    parameters = draw_parameters(2) | {"inp_shape": (3, 5), "in_channels": 1, "depth": 1, "patch_size": 2}
    model, _ = make_model(parameters)
    check_gradients_numerically(model, list(random_tensor(1, 1, 3, 5).split(model.column_sizes, -1)), rank, twice=False)


@ranks(2, 3)
def test_channels_in_and_out_and_random_weights(rank, world_size):
    manager = DistributedManager()
    manager.create_process_subgroup(SPLIT, world_size)
    parameters = draw_parameters(1) | {"in_channels": 5, "out_channels": 4}
    del parameters["depth"]
    model, _ = make_model(parameters, depth=1)
    parts, _ = make_model(parameters, depth=1, channel_parallel_inputs=True, channel_parallel_outputs=True)
    images = random_tensor(2, 5, *parameters["inp_shape"])
    mine = images.tensor_split(world_size, 1)[rank]
    torch.testing.assert_close(parts(mine), model(images).tensor_split(world_size, 1)[rank])
    torch.manual_seed(rank)  # as initialize(seed=) does: other random numbers on each rank
    drawn = fft.DistributedAFNO(**parameters, depth=1).whole_state()
    after = torch.rand(1)
    assert all(torch.equal(tensor, broadcast_data(tensor)) for tensor in drawn.values())
    weights = drawn["blocks.0.mlp.1.first_weight"]
    assert len(weights.unique()) == weights.numel(), "each slice is drawn by itself"
    torch.manual_seed(rank)
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(1), after), "the rank's own random numbers go on as after one draw"
    with pytest.raises(ValueError, match=r"x must be of shape \(samples, 5, "):
        model(mine)


@ranks(1)
def test_wrong_use():
    with pytest.raises(UndefinedGroupError, match=r"'model_parallel' must be a group .*, got \[\]\. Call .*mesh"):
        fft.DistributedAFNO((4, 4), 1)
    DistributedManager.create_process_subgroup(SPLIT, 1)
    with pytest.raises(ValueError, match="num_blocks must divide embed_dim, got 4 blocks of 6 channels"):
        fft.DistributedAFNO((4, 4), 1, embed_dim=6)
    with pytest.raises(ValueError, match=r"patch_size must be positive, got \(0, 1\)"):
        fft.DistributedAFNO((4, 4), 1, patch_size=(0, 1))
