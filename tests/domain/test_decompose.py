import collections
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from distman import DistmanError, DistributedManager
from distman.checkpoint import save
from distman.collectives import all_gather_objects, all_gather_v
from distman.data import distributed_loader
from distman.domain import DomainDataset, decompose, gather_domain
from distman.domain._axes import layout_of
from distman.handler import NNHandler
from distman.testing import ranks
from tests.domain.layers import block_of, total
from tests.domain.models import FNO, ResNet, UNet
from tests.domain.reference import cut, drawer

DIMS = {-2: "rows", -1: "columns"}


def shape_mesh(world_size):
    rows = 2 if world_size == 4 else 1
    DistributedManager().initialize_mesh((rows, world_size // rows), ("rows", "columns"))
    return {-2: rows, -1: world_size // rows}


def my_block(field, sizes):
    manager = DistributedManager()
    for dim, listed in sizes.items():
        field = field.split(listed, dim)[manager.group_rank(DIMS[dim])]
    return field.clone()


def cuts_of(field, shape, draw, *, even):
    return {
        dim: [field.shape[dim] // num] * num if even else cut(field.shape[dim], num, draw) for dim, num in shape.items()
    }


def compute(model, field, time):
    return model(field, time) if isinstance(model, UNet) else model(field)


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", [ResNet, UNet, FNO])
@ranks(1, 3, 4)
def test_a_training_is_that_of_one_process(world_size, kind, even):
    torch.manual_seed(0)
    shape, draw = shape_mesh(world_size), drawer(world_size)
    model = kind().double()
    split = decompose(copy.deepcopy(model), DIMS)
    assert [*split.state_dict()] == [*model.state_dict()]
    optimizers = [torch.optim.SGD(one.parameters(), 0.02) for one in (model, split)]
    for _ in range(2):
        field, time = torch.randn(2, 2, 24, 24).double(), torch.randn(2, 3).double()
        block = my_block(field, cuts_of(field, shape, draw, even=even))
        expected, result = compute(model, field, time), compute(split, block, time)
        is_split = bool(layout_of(result))
        manager = DistributedManager()
        rank_in = {dim: manager.group_rank(group) for dim, group in DIMS.items()}
        torch.testing.assert_close(result, block_of(expected, layout_of(result), rank_in), rtol=1e-10, atol=1e-11)
        expected.square().mean().backward()
        share = result.square().sum() / expected.numel()
        (share if is_split else share / world_size).backward()
        for one, other in zip(split.parameters(), model.parameters(), strict=True):
            one.grad = total(one.grad)
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Calling(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(self, x) if self.layers else self.function(x)


def unseen_mean(x):
    """Compute as an extension does, or a scripted function: past what watches over functions."""
    with torch._C.DisableTorchFunction():
        return x.mean(-1, keepdim=True)


REFUSED = {
    "pad": (lambda x: functional.pad(x, (1, 1)), "got pad: .*ZeroPad2d"),
    "interpolate": (lambda x: functional.interpolate(x, scale_factor=2), r"got interpolate: .*torch.nn.Upsample"),
    "roll": (lambda x: torch.roll(x, 1, -1), r"got roll: .*distman.domain.Roll"),
    "fft": (lambda x: torch.fft.rfft2(x).real, "got fft_rfft2: .*distman.domain.SpectralConv"),
    "mean": (lambda x: x.mean(), "got mean: it does not keep dim -2, which is split.*AdaptiveAvgPool2d"),
    "mean of a dim": (lambda x: x.mean(-1), "got mean: it does not keep dim -1"),
    "sum": (lambda x: x.sum((1, 2)), "got sum: it does not keep dim -2"),
    "flatten": (lambda x: x.flatten(1), "got flatten: it does not keep dim -[12].*AdaptiveAvgPool2d"),
    "view": (lambda x: x.view(2, -1), "got view: it does not keep dim"),
    "conv2d": (lambda x: functional.conv2d(x, torch.ones(1, 1, 3, 3)), "got conv2d: .*module of torch.nn for conv2d"),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2), "got max_pool2d: .*module of torch.nn"),
    "slice": (lambda x: x[..., 1:], "got getitem: it does not keep dim -1"),
    "flip": (lambda x: x.flip(-1), "got flip: it is not known"),
    "flips": (lambda x: x.flip(1, 2), "got flip: it is not known"),
    "softmax": (lambda x: x.softmax(2), "got softmax: it computes along dim 2"),
    "cumsum": (lambda x: x.cumsum(-1), "got cumsum: it computes along dim -1"),
    "linear": (lambda x: functional.linear(x, torch.ones(4, 4)), "got linear: it needs the lengths of a block"),
    "matmul": (lambda x: x @ x, "got matmul: it (needs the lengths of a block|does not keep dim)"),
    "einsum": (lambda x: torch.einsum("bchw,bchv->bcwv", x, x), "got einsum: .*Conv2d"),
    "a grid": (lambda x: x + torch.linspace(0, 1, x.shape[-1]), "got add: a tensor of shape .* pass it to the module"),
    "transposed": (lambda x: x + x.transpose(-1, -2), "got add: its fields are split unlike"),
    "variance": (lambda x: x.var(unbiased=False), "got var: it does not keep dim -2"),
    "loss": (lambda x: functional.mse_loss(x, x), "got mse_loss"),
    "norm": (lambda x: functional.layer_norm(x, x.shape[-1:]), "got layer_norm: .*module of torch.nn"),
    "attention": (lambda x: functional.scaled_dot_product_attention(x, x, x), "got scaled_dot_product_attention"),
    "unfold": (lambda x: x.unfold(-1, 2, 1), "got unfold"),
    "indices": (lambda x: x[:, :, torch.tensor([0])], "got indexing by tensors"),
    "every other": (lambda x: x[..., ::2], "got getitem: it does not keep dim -1"),
    "halves": (lambda x: torch.cat(x.chunk(2, -1), 1), "got chunk: it does not keep dim -1"),
    "squeeze": (lambda x: x.squeeze(), "got squeeze: which dims it drops depends on the rank|got squeeze: it does not"),
    "joined": (lambda x: torch.cat([x, x], -1), "got cat: it does not keep dim -1"),
    "repeated": (lambda x: x.repeat(1, 1, 2, 1), "got repeat: it does not keep dim -2"),
    "square": (lambda x: x @ x.transpose(-1, -2), "got matmul: it does not keep dim -2"),
    "products": (lambda x: torch.einsum("bchw,bchw->bc", x, x), "got einsum: it multiplies fields"),
    "where": (lambda x: torch.where(x > 0)[0] + x, "got where: it is not known"),
    "beyond a block": (lambda x: x[..., :3], "got getitem: it does not keep dim -1"),
    "made to require a gradient": (lambda x: x.requires_grad_().mean(-1), "got mean: it does not keep dim -1"),
    "unseen": (lambda x: x - unseen_mean(x), "got sub: of a tensor nobody knows how it is split"),
    "mapped": (lambda x: x + torch.vmap(torch.sin)(x), "got add: of a tensor nobody knows"),
    "slope of a whole one": (
        lambda x: x + torch.autograd.grad((x * (gain := torch.ones(1, requires_grad=True))).sum(1), gain, x[:, 0])[0],
        "got autograd_grad: it differentiates by what is not split",
    ),
    "equal": (lambda x: x if torch.equal(x, x) else -x, "got equal: it is not known"),
}


@pytest.mark.gloo_only("what the guard says does not depend on the backend")
@ranks(4)
def test_functions_that_mix_positions_are_refused():
    shape_mesh(4)
    for name, (function, message) in REFUSED.items():
        model = decompose(Calling(function), DIMS)
        must = rf"(?s)functions in a decomposed module must not mix positions.*{message}"
        with pytest.raises(ValueError, match=must):
            model(torch.ones(2, 1, 4, 4))
        assert torch.equal(torch.ones(2).flip(0), torch.ones(2))  # nothing is refused afterwards
        assert all_gather_objects(name) == [name] * 4


ALLOWED = {
    "pointwise": lambda x: (torch.sin(x) * 2 + x**2 - x / 3).clamp(-1, 1).add_(1).where(x > 0, -x) + functional.gelu(x),
    "channels": lambda x: (x.softmax(1) * x.sum(1, keepdim=True)).cumsum(1) + x.mean((0, 1), keepdim=True),
    "reduced": lambda x: x.amax(1) + x.max(dim=1).values + x.norm(2, 1),
    "moved": lambda x: x.permute(0, 2, 3, 1).unsqueeze(1).transpose(0, 1).squeeze(0).movedim(-1, 1) + x,
    "shaped": lambda x: (
        x.reshape(x.shape[0] * 2, 1, *x.shape[2:]).view(x.shape[0], 2, *x.shape[2:]).unflatten(0, (1, -1))
    ),
    "indexed": lambda x: x[:, 0][:, None] + x[:, 1:] + x[..., None, :, :][:, 1],
    "joined": lambda x: (
        torch.cat([torch.stack(x.unbind(1), 1), x], 1) + torch.stack([x, x], 2).sum(2).repeat(1, 2, 1, 1)
    ),
    "mixed": lambda x: torch.einsum("bihw,oi->bohw", x, torch.ones(3, 2).double()),
    "contracted": lambda x: (x.permute(0, 2, 3, 1) @ torch.ones(2, 2).double()).permute(0, 3, 1, 2),
    "linear": lambda x: functional.linear(x.movedim(1, -1), torch.ones(3, 2).double()).movedim(-1, 1),
    "slope": lambda x: torch.autograd.grad((y := x.requires_grad_().sin()), x, torch.ones_like(y), create_graph=True)[
        0
    ],
    "chosen": lambda x: torch.where(x > 0, x, 2 * x) + x.where(x < 0, -x),
    "complex": lambda x: torch.view_as_real(torch.complex(x, -x)).movedim(-1, 1).flatten(1, 2),
    "of parts": lambda x: functional.prelu(x, torch.tensor([0.5, -0.5]).double()) + x.contiguous().real,
    "expanded": lambda x: x.expand(2, *x.shape).sum(0) + x.new_zeros(1, 1, 1, 1) + torch.zeros_like(x),
}


@pytest.mark.gloo_only("what the guard says does not depend on the backend")
@ranks(4)
def test_functions_that_treat_each_position_alone_are_computed():
    shape = shape_mesh(4)
    manager = DistributedManager()
    rank_in = {dim: manager.group_rank(group) for dim, group in DIMS.items()}
    field = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(0)).double()
    for name, function in ALLOWED.items():
        sizes = cuts_of(field, shape, drawer(name), even=False)
        convolve = nn.Conv2d(2, 2, 3, padding=1).double()
        nn.init.ones_(convolve.weight)
        nn.init.zeros_(convolve.bias)
        model = Calling(lambda self, x, function=function: function(self.layers[0](x)), convolve)
        expected = model(field)
        result = decompose(model, DIMS)(my_block(field, sizes))
        layout = layout_of(result)
        assert set(layout) == {-2, -1}, name
        torch.testing.assert_close(result, block_of(expected, layout, rank_in), rtol=1e-12, atol=1e-12)


@ranks(2)
def test_what_is_not_known_is_named():
    layers = nn.Sequential(nn.ModuleDict({"attention": nn.MultiheadAttention(2, 1)}), nn.LSTM(2, 2))
    with pytest.raises(ValueError, match=r"got 0.attention \(MultiheadAttention\), 1 \(LSTM\). Decompose the parts"):
        decompose(layers, {-1: "world"})
    with pytest.raises(ValueError, match=r"got 0 \(MaxPool1d\)"):
        decompose(nn.Sequential(nn.MaxPool1d(2, return_indices=True)), {-1: "world"})
    for dims in ({}, {2: "world"}, {-1: "world", -2: "world"}):
        with pytest.raises(ValueError, match="dims must name dims, counted from the end"):
            decompose(nn.Conv1d(1, 1, 1), dims)
    model = decompose(nn.Sequential(nn.Conv1d(1, 1, 3)), {-1: "world"})
    with pytest.raises(ValueError, match="module must not be decomposed yet, got a decomposed Sequential"):
        decompose(model, {-1: "world"})
    with pytest.raises(DistmanError, match="a decomposed BlocksConv1d must be called within its model"):
        model[0](torch.ones(1, 1, 5))
    model(torch.ones(1, 1, 5))
    with pytest.raises(DistmanError, match="a decomposed BlocksConv1d must be called within its model"):
        model[0](torch.ones(1, 1, 5))  # though the model has seen such a tensor
    with pytest.raises(ValueError, match="must have the dims"):
        model(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Conv1d in a decomposed model must have a kernel that fits"):
        model(torch.ones(1, 1, 1))


@ranks(2)
def test_fields_that_are_split_unlike_are_refused_on_all_ranks(rank):
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    model = decompose(Sum(), {-1: "world"})
    assert model(torch.ones(1, 2 + rank), torch.ones(1, 2 + rank)).shape == (1, 2 + rank)
    with pytest.raises(ValueError, match="fields of length 5 along dim -1 must be split into"):
        model(torch.ones(1, 2 + rank), torch.ones(1, 3 - rank))


class Same(torch.autograd.Function):
    """Its gradient is clamped."""

    @staticmethod
    def forward(_ctx, x):
        return x

    @staticmethod
    def backward(_ctx, grad):
        return grad.clamp(-1, 1)


class Halved(Same):
    @staticmethod
    def forward(_ctx, x):
        return x / 2


class Unseen(Same):
    """Computes as an extension does, past what watches over functions."""

    @staticmethod
    def forward(_ctx, x):
        with torch._C.DisableTorchFunction():
            return x * 2


def between_convolutions(function):
    torch.manual_seed(0)
    first, last = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)
    return Calling(lambda self, x: self.layers[1](function(self.layers[0](x))), first, last).double()


@pytest.mark.gloo_only("how a field is followed does not depend on the backend")
@pytest.mark.parametrize("way", ["backward hook", "clamped gradient", "own function", "sharded units", "compiled"])
@ranks(2)
def test_a_field_is_followed_through_what_autograd_wraps(rank, way):
    function = {"clamped gradient": Same.apply, "own function": Halved.apply}.get(way, torch.tanh)
    whole, model = between_convolutions(function), decompose(between_convolutions(function), {-1: "world"})
    if way == "backward hook":
        model.layers[1].register_full_backward_hook(lambda *_: None)
    elif way == "sharded units":
        model = DistributedManager().wrap_fsdp(model, shard=nn.Conv1d)
    elif way == "compiled":
        model = torch.compile(model, backend="eager")
    field = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(0)).double()
    for _ in range(2):
        result = model(field.split([4, 5], -1)[rank].clone())
        torch.testing.assert_close(result, whole(field).split([4, 5], -1)[rank], rtol=1e-12, atol=1e-12)
        result.sum().backward()


@ranks(2)
def test_a_tensor_of_which_nobody_knows_how_it_is_split_is_refused():
    model = decompose(between_convolutions(Unseen.apply), {-1: "world"})
    with pytest.raises(ValueError, match="Conv1d in a decomposed model must know how its input is split"):
        model(torch.ones(1, 1, 3).double())
    with pytest.raises(ValueError, match="a decomposed Calling must return tensors that torch has made"):
        decompose(Calling(Unseen.apply), {-1: "world"})(torch.ones(1, 3))

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("grid", torch.linspace(0, 1, 5)[None, None])
            self.convolve, self.scale = nn.Conv1d(1, 2, 3), nn.Parameter(torch.ones(1, 1, 5))
            self.plain = [torch.ones(1, 1, 5)]

        def forward(self, x):
            of_model = self.convolve(self.grid * 2) + self.convolve(self.scale) + self.convolve(torch.ones(1, 1, 5))
            return x + of_model.mean() * self.plain[0].mean()

    model = Positions()
    expected = model(torch.ones(1, 1, 4))
    torch.testing.assert_close(decompose(model, {-1: "world"})(torch.ones(1, 1, 2)), expected[..., :2])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@ranks(2)
def test_an_interrupted_call_leaves_nothing_behind(error):
    class Interrupted(nn.Module):
        error = None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return x

    model = decompose(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), Interrupted(), nn.Tanh()), {-1: "world"})
    block = torch.ones(1, 1, 4)
    expected = model(block)
    model[1].error = error
    with pytest.raises(error):
        model(block)
    model[1].error = None
    assert torch.equal(model(block), expected)
    assert block.mean() == 1


@ranks(2)
def test_fields_within_other_inputs_are_fields(rank):
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolve = nn.Conv1d(2, 1, 3, padding=1)

        def forward(self, fields, *, scale):
            return self.convolve(torch.cat(fields["both"], 1)) * scale, scale

    torch.manual_seed(0)
    model, fields = Joined(), [torch.randn(1, 1, 7) for _ in range(2)]
    expected, _ = model({"both": fields}, scale=torch.tensor(2.0))
    blocks = [field.split([3, 4], -1)[rank] for field in fields]
    result, _ = decompose(model, {-1: "world"})({"both": blocks}, scale=torch.tensor(2.0))
    torch.testing.assert_close(result, expected.split([3, 4], -1)[rank])


@ranks(2)
def test_blocks_and_results_are_plain_tensors(rank, tmp_path):
    manager = DistributedManager()
    manager.initialize_mesh((1, 2), ("rows", "columns"))
    model = decompose(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1)), {-1: manager.group("columns")})
    block = torch.ones(1, 1, 4)
    with torch.no_grad():
        result = model(block)
    for tensor in (block, result):
        assert not vars(tensor)
        save({"field": tensor}, tmp_path / f"{rank}.pt", local=True)
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt")["field"], tensor)
    assert torch.equal(copy.deepcopy(model)(block), result)


@ranks(2)
def test_an_output_size_of_a_block_is_refused():
    class Enlarged(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose1d(1, 1, 3, 2)

        def forward(self, x):
            return self.up(x, output_size=[10])

    with pytest.raises(ValueError, match=r"must be called without output_size, got \[10\]"):
        decompose(Enlarged(), {-1: "world"})(torch.ones(1, 1, 4))
    layer = decompose(nn.Sequential(nn.Conv1d(1, 1, 3)), {-1: "world"})[0]
    with pytest.raises(TypeError, match="too many positional arguments"):
        layer(torch.ones(1, 1, 4), [10])


@ranks(1, 2)
def test_a_mean_in_half_precision_is_no_sum_in_it(world_size):
    field = torch.full((1, 1, 8, 1440), 60.0).half()
    pool = decompose(nn.AdaptiveAvgPool2d(1), {-1: "world"})
    assert torch.equal(pool(field.chunk(world_size, -1)[0]), nn.AdaptiveAvgPool2d(1)(field))


@ranks(2)
def test_check_compares_with_the_full_field():
    torch.manual_seed(0)
    field = torch.randn(2, 3, 9)
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(), nn.ConvTranspose1d(4, 2, 2, 2)
    )
    before = copy.deepcopy(model.state_dict())
    decompose(model, {-1: "world"}, check=field)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    decompose(Calling(lambda x: {"twice": (2 * x, x), "name": "x"}), {-1: "world"}, check=field)

    with pytest.raises(ValueError, match="must hold tensors, to be compared, got a str"):
        decompose(Calling(lambda x: f"{x.sum()}"), {-1: "world"}, check=field)
    wrong = Calling(lambda x: collections.deque([x * x.shape[-1]]))  # the length of the block is not that of the field
    with pytest.raises(ValueError, match="must compute what the model did"):
        decompose(wrong, {-1: "world"}, check=field)

    class Hidden(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.detach().numpy() - x.detach().numpy().mean(-1, keepdims=True))

    with pytest.raises(ValueError, match=r"must (compute|return)|not mix positions"):
        decompose(nn.Sequential(nn.Conv1d(3, 4, 3), Hidden()), {-1: "world"}, check=field)


@ranks(2)
def test_what_is_empty_along_a_whole_dim_is_padded():
    for layer in (nn.ZeroPad2d(1), nn.ConstantPad2d(2, 3.0)):
        full = torch.zeros(1, 1, 8, 0, requires_grad=True)
        result = decompose(nn.Sequential(layer), {-2: "world"})(full.tensor_split(2, -2)[DistributedManager().rank])
        expected = functional.pad(full, layer.padding, value=layer.value)
        assert torch.equal(all_gather_v(result, dim=-2), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_activation_checkpointing_of_layers(rank, reentrant):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv1d(2, 2, 5, padding=2), nn.GELU(), nn.GroupNorm(1, 2), nn.Conv1d(2, 2, 3, 2)).double()

    class Outer(nn.Module):
        def __init__(self, *, saves):
            super().__init__()
            self.inner, self.saves = copy.deepcopy(inner), saves

        def forward(self, x):
            x = x.sin()
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.saves else self.inner(x)

    field = torch.randn(1, 2, 11).double()
    grads = []
    for saves in (False, True):
        model = decompose(Outer(saves=saves), {-1: "world"})
        block = field.split([4, 7], -1)[rank].clone().requires_grad_()
        model(block).square().sum().backward()
        grads.append([block.grad, *(one.grad for one in model.parameters())])
    torch.testing.assert_close(*grads)


@ranks(2)
def test_copies_and_pickles_and_state_dicts():
    model = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.MaxPool1d(2))
    state = copy.deepcopy(model.state_dict())
    split = decompose(model, {-1: "world"})
    split.load_state_dict(state)
    assert isinstance(split[0], nn.Conv1d)
    block = torch.randn(1, 1, 6)
    expected = split(block)
    for other in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):  # noqa: S301 - our own
        assert torch.equal(other(block), expected)


def smoothing():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 1, 3, padding=1)).double()


@pytest.mark.parametrize("wrap", ["wrap_ddp", "wrap_fsdp"])
@ranks(4)
def test_data_parallelism_beside_it(wrap):
    manager = DistributedManager()
    manager.initialize_mesh((2, 1, 2), ("data", "rows", "columns"))
    model_of_one, fields = smoothing(), torch.randn(4, 1, 8).double()
    wrapped = getattr(manager, wrap)(decompose(smoothing(), {-1: "columns"}))
    mine = fields.split(2)[manager.group_rank("data")].split([3, 5], -1)[manager.group_rank("columns")]
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model_of_one, wrapped)]
    for _ in range(3):
        model_of_one(fields).square().mean().backward()
        (wrapped(mine).square().sum() * 4 / fields.numel()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(wrapped.parameters(), model_of_one.parameters(), strict=True):
        whole = one.full_tensor() if wrap == "wrap_fsdp" else one
        torch.testing.assert_close(whole, other, rtol=1e-10, atol=1e-12)
    whole = gather_domain(wrapped(mine).detach(), {-1: "columns"}, everywhere=True)
    torch.testing.assert_close(whole, model_of_one(fields.split(2)[manager.group_rank("data")]))


@pytest.fixture(scope="module")
def losses_of_one_process():
    fields = torch.randn(8, 1, 7, generator=torch.Generator().manual_seed(0)).double()
    model = smoothing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        total_of_epoch = 0.0
        for batch in fields.split(4):
            loss = functional.mse_loss(model(batch), batch.roll(1, 0))
            total_of_epoch += float(loss.detach()) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total_of_epoch)
    return losses


@ranks(1, 2, 4)
def test_the_handler_trains_it(losses_of_one_process, world_size):
    manager = DistributedManager()
    columns = min(world_size, 2)
    manager.initialize_mesh((-1, columns), ("data", "columns"))
    fields = torch.randn(8, 1, 7, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.cat([batch.roll(1, 0) for batch in fields.split(4)])
    weights = {-1: [1, 2][:columns]}
    dataset = DomainDataset([fields.numpy(), targets.numpy()], {-1: "columns"}, weights=weights)
    handler = NNHandler(lambda: decompose(smoothing(), {-1: "columns"}), logger_mode=None)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(functional.mse_loss, num_samples=lambda batch: batch[0].numel())
    per_rank = 4 * columns // world_size
    handler.set_train_loader(distributed_loader(dataset, batch_size=per_rank, shuffle=False, group="data"))
    assert handler.train(2)["loss"] == pytest.approx(losses_of_one_process, rel=1e-10)


@pytest.mark.gloo_only("the stand-in for NCCL fills tensors in threads of its own, which are in no inference mode")
@ranks(2)
def test_a_training_after_an_inference(rank):
    model = decompose(
        nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Upsample(9, mode="linear"), nn.AdaptiveAvgPool1d(4)),
        {-1: "world"},
    )
    with torch.inference_mode():
        expected = model(torch.ones(1, 1, 2 + rank))
    result = model(torch.ones(1, 1, 2 + rank))
    result.sum().backward()
    assert torch.equal(result, expected)
