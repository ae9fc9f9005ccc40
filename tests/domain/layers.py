"""Layers drawn at random, and what they must compute on blocks."""

import copy
import math

import torch
from torch import nn

from distman import DistributedManager
from distman.collectives import all_gather_v
from distman.domain import Roll, SpectralConv, decompose
from distman.domain._axes import layout_of
from tests.domain.reference import cut, drawer

MODES = ["zeros", "circular", "reflect", "replicate"]


def conv(draw, num):
    kernel, dilation = [draw.randint(1, 7) for _ in range(num)], [draw.randint(1, 3) for _ in range(num)]
    groups = draw.choice([1, 2])
    mode = draw.choice(MODES)
    padding = [draw.randint(0, 4) for _ in range(num)]
    stride = [draw.randint(1, 3) for _ in range(num)]
    if draw.random() < 0.2:
        padding, stride = "same", 1
    return getattr(nn, f"Conv{num}d")(
        2, 2 * groups, kernel, stride, padding, dilation, groups, bias=draw.random() < 0.5, padding_mode=mode
    )


def conv_transpose(draw, num):
    stride, dilation = [draw.randint(1, 3) for _ in range(num)], [draw.randint(1, 3) for _ in range(num)]
    extra = [draw.randint(0, max(one, other) - 1) for one, other in zip(stride, dilation, strict=True)]
    return getattr(nn, f"ConvTranspose{num}d")(
        2,
        4,
        [draw.randint(1, 7) for _ in range(num)],
        stride,
        [draw.randint(0, 2) for _ in range(num)],
        extra,
        groups=draw.choice([1, 2]),
        bias=draw.random() < 0.5,
        dilation=dilation,
    )


def max_pool(draw, num):
    kernel = [draw.randint(1, 5) for _ in range(num)]
    padding = [draw.randint(0, one // 2) for one in kernel]
    stride = draw.choice([None, [draw.randint(1, 3) for _ in range(num)]])
    dilation = [draw.randint(1, 2) for _ in range(num)]
    return getattr(nn, f"MaxPool{num}d")(kernel, stride, padding, dilation, ceil_mode=draw.random() < 0.3)


def avg_pool(draw, num):
    kernel = [draw.randint(1, 5) for _ in range(num)]
    padding = [draw.randint(0, one // 2) for one in kernel]
    stride = draw.choice([None, [draw.randint(1, 3) for _ in range(num)]])
    other = {} if num == 1 or draw.random() < 0.7 else {"divisor_override": 3}
    return getattr(nn, f"AvgPool{num}d")(
        kernel, stride, padding, ceil_mode=draw.random() < 0.3, count_include_pad=draw.random() < 0.5, **other
    )


def adaptive_pool(draw, num):
    kind = draw.choice(["Avg", "Max"])
    return getattr(nn, f"Adaptive{kind}Pool{num}d")([draw.choice([1, 1, 2, 3, 5]) for _ in range(num)])


def batch_norm(draw, num):
    layer = getattr(nn, f"BatchNorm{num}d")(
        2, affine=draw.random() < 0.7, track_running_stats=draw.random() < 0.8, momentum=draw.choice([0.1, None])
    )
    return layer.train(draw.random() < 0.7)


def group_norm(draw, _):
    return nn.GroupNorm(draw.choice([1, 2]), 2, affine=draw.random() < 0.7)


def layer_norm(draw, lengths):
    return nn.LayerNorm(lengths[draw.randrange(len(lengths)) :], elementwise_affine=draw.random() < 0.7)


def instance_norm(draw, num):
    layer = getattr(nn, f"InstanceNorm{num}d")(2, affine=draw.random() < 0.5, track_running_stats=draw.random() < 0.5)
    return layer.train(draw.random() < 0.7)


def upsample(draw, num):
    mode = draw.choice(["nearest", "nearest-exact", ["linear", "bilinear", "trilinear"][num - 1], "area"])
    if num == 2 and draw.random() < 0.3:
        mode = "bicubic"
    options = {"align_corners": draw.random() < 0.5} if "linear" in mode or mode == "bicubic" else {}
    if draw.random() < 0.5:
        return nn.Upsample([draw.randint(1, 12) for _ in range(num)], mode=mode, **options)
    scale = draw.choice([2, 3, 0.5, 1.7])
    return nn.Upsample(scale_factor=scale, mode=mode, recompute_scale_factor=draw.choice([None, True]), **options)


def pad(draw, num):
    kind = draw.choice(["Zero", "Constant", "Reflection", "Replication", "Circular"])
    pads = [draw.randint(-1 if kind in ("Zero", "Constant") else 0, 3) for _ in range(2 * num)]
    arguments = [1.5] if kind == "Constant" else []
    return getattr(nn, f"{kind}Pad{num}d")(pads, *arguments)


def roll(draw, num):
    return Roll([draw.randint(-9, 9) for _ in range(num)], list(range(-num, 0)))


def pixel_shuffle(draw, _):
    return draw.choice([nn.PixelShuffle, nn.PixelUnshuffle])(draw.choice([1, 2]))


def spectral_conv(draw, num):
    return SpectralConv(2, draw.randint(1, 3), [draw.randint(1, 4) for _ in range(num)])


KINDS = {
    one.__name__: one
    for one in (
        *(conv, conv_transpose, max_pool, avg_pool, adaptive_pool, batch_norm, group_norm, instance_norm, upsample),
        *(pad, roll, pixel_shuffle, spectral_conv, layer_norm),
    )
}


def drawn(draw, kind, generator):
    """Return a layer and a field that torch can compute."""
    while True:
        num = 2 if kind == "pixel_shuffle" else draw.choice([1, 2, 2, 3])
        channels = 8 if kind == "pixel_shuffle" else 2
        lengths = [draw.randint(1, 12 if num < 3 else 7) for _ in range(num)]
        layer = KINDS[kind](draw, lengths if kind == "layer_norm" else num).double()
        field = torch.randn(2, channels, *lengths, dtype=torch.float64, generator=generator)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
        try:
            result = copy.deepcopy(layer)(field)
            if result.numel() and result.isfinite().all():  # torch's second derivative of a maximum of nothing crashes
                return layer, field, num
        except (ValueError, RuntimeError, IndexError):
            continue


def block_of(full, layout, rank_in):
    for dim, axis in layout.items():
        start, end = axis.intervals[rank_in[dim]]
        full = full.narrow(dim, start, end - start)
    return full


def total(tensor):
    return all_gather_v(tensor[None]).sum(0)


def derivatives(result, weights, inputs, second):
    """Return gradients of a loss, and of what is made of the first of them."""
    loss = (result * result * weights).sum() + (result * weights).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    again = torch.autograd.grad((first[0] * first[0] * second).sum(), inputs, allow_unused=True)
    return list(first), [torch.zeros_like(one) if g is None else g for one, g in zip(inputs, again, strict=True)]


def check_model(model, field, dims, draw, generator, tolerance=1e-12):
    """Compare a decomposed copy of a model with the model: results, and first and second derivatives."""
    manager = DistributedManager()
    split = decompose(copy.deepcopy(model), dims)
    assert list(split.state_dict()) == list(model.state_dict())
    block, rank_in, group_size = field, {}, {}
    for dim, group in dims.items():
        rank_in[dim] = manager.group_rank(group) if group != "world" else manager.rank
        group_size[dim] = manager.group_size(group) if group != "world" else manager.world_size
        block = block.split(cut(field.shape[dim], group_size[dim], draw), dim)[rank_in[dim]]
    block = block.clone().requires_grad_()
    full = field.clone().requires_grad_()
    expected, result = model(full), split(block)
    out_layout, in_layout = layout_of(result), layout_of(block)
    copies = math.prod(group_size[dim] for dim in dims if dim not in out_layout)  # of the result
    replicas = manager.world_size // math.prod(group_size.values())  # of the field

    def close(mine, whole):
        assert mine.shape == whole.shape
        if whole.numel():
            torch.testing.assert_close(mine, whole, rtol=tolerance, atol=tolerance * max(1, whole.abs().max().item()))

    close(result, block_of(expected, out_layout, rank_in))
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    second = torch.randn(full.shape, dtype=full.dtype, generator=generator)
    wanted = derivatives(expected, weights, [full, *model.parameters()], second)
    found = derivatives(
        result,
        block_of(weights, out_layout, rank_in) / copies,
        [block, *split.parameters()],
        block_of(second, in_layout, rank_in),
    )
    for mine, whole in zip(found, wanted, strict=True):
        close(mine[0], block_of(whole[0], in_layout, rank_in))
        for one, other in zip(mine[1:], whole[1:], strict=True):
            close(total(one.detach()) / replicas, other.detach())
    for (name, one), other in zip(split.named_buffers(), model.buffers(), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-11, atol=1e-12), name


def check_drawn_layer(kind, seed, world_size, dims_of):
    draw, generator = drawer(kind, seed, world_size), torch.Generator().manual_seed(seed)
    layer, field, num = drawn(draw, kind, generator)
    check_model(layer, field, dims_of(num, draw), draw, generator, 1e-10 if "norm" in kind else 1e-12)
