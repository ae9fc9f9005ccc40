"""The convolution of Fourier neural operators, against torch's transforms on the full field."""

import pytest
import torch

from distman.domain import SpectralConv


def by_torch(layer, field):
    """Take the kept frequencies out of torch's spectrum, one corner after the other, as the paper does."""
    num = len(layer.modes)
    dims = tuple(range(-num, 0))
    spectrum, weight = torch.fft.rfftn(field, dim=dims), torch.view_as_complex(layer.weight)
    result = spectrum.new_zeros(len(field), weight.shape[1], *spectrum.shape[2:])
    for corner in range(2 ** (num - 1)):
        parts = [slice(-modes, None) if corner >> at & 1 else slice(modes) for at, modes in enumerate(layer.modes[:-1])]
        place = (slice(None), slice(None), *parts, slice(layer.modes[-1]))
        result[place] = torch.einsum("bi...,io...->bo...", spectrum[place], weight[place])
    return torch.fft.irfftn(result, field.shape[2:], dim=dims)


@pytest.mark.parametrize(
    ("modes", "lengths"),
    [([3], [7]), ([4], [6]), ([2, 3], [5, 9]), ([3, 4], [6, 6]), ([1, 1], [2, 1]), ([2, 1, 3], [4, 5, 6])],
    ids=str,
)
def test_one_process_computes_what_the_paper_says(modes, lengths):
    torch.manual_seed(0)
    layer = SpectralConv(2, 3, modes).double()
    field = torch.randn(4, 2, *lengths, dtype=torch.float64, requires_grad=True)
    results = [layer(field), by_torch(layer, field)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
    grads = [torch.autograd.grad(one.sin().sum(), [field, layer.weight]) for one in results]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_precision_and_modes():
    layer = SpectralConv(2, 2, [2, 3])
    field = torch.randn(1, 2, 8, 8)
    with torch.inference_mode():
        expected = layer(field)
    assert torch.equal(layer(field), expected)  # nothing that is kept of an inference hinders a training
    layer(field).sum().backward()
    assert layer(field.bfloat16()).dtype == torch.bfloat16
    for given in (torch.ones(1, 2, 3, 8), torch.ones(1, 2, 8, 3), torch.ones(2, 8, 8)):
        with pytest.raises(
            ValueError, match=r"a field must have samples, channels and 2 dims, long enough for \[2, 3\]"
        ):
            layer(given)
