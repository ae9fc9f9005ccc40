"""A Fourier neural operator whose channels and grid are split over ranks.

Source:
    Guibas et al., "Adaptive Fourier Neural Operators: Efficient Token Mixers for Transformers", ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from distman import mappings
from distman.collectives import broadcast_data
from distman.errors import UndefinedGroupError
from distman.fft._transforms import DistributedIRFFT2, DistributedRFFT2
from distman.manager import DistributedManager
from distman.topology import split_sizes

_CHANNELS = "model_parallel"
_COLUMNS = "spatial_parallel"
_TOKEN_DIMS = (1, 2)  # of (sample, row, column, ...)


class DistributedAFNO(nn.Module):
    """An adaptive Fourier neural operator for images, model-parallel over the manager's groups.

    It takes this rank's columns of images, of shape (sample, channel, row, column), and returns as many images, with
    ``out_channels``; collective over the two groups, and differentiable.

    Along the group ``"model_parallel"`` its channels are split, and along ``"spatial_parallel"``, if there is such a
    group, the columns of the images: each of its ranks has whole patches, ``column_sizes`` columns of all. The
    gradients are those of the sum of the losses of the ranks of ``"spatial_parallel"``, the same loss on the ranks of
    ``"model_parallel"``. To split the samples too, wrap it in DDP over a third group.

    Collective: all ranks of the job make it alike, and hold slices of the same random weights, drawn from the random
    numbers of rank 0. No size needs to divide another, except ``num_blocks`` ``embed_dim``: patches that reach beyond
    the image are filled with zeros, and some ranks have more blocks, or columns, than others.

    Args:
        inp_shape: Height and width of the whole images.
        in_channels: Channels of the input.
        out_channels: Channels of the output; None: as many.
        patch_size: Side of the patches, or height and width.
        embed_dim: Channels inside.
        depth: Number of blocks of two layers.
        num_blocks: Blocks of channels that have weights of their own for the spectrum; a rank has whole ones.
        mlp_ratio: Channels of the hidden layers by those of the others.
        sparsity_threshold: What is smaller in the spectrum becomes 0.
        positions: Whether it learns where a patch is; without, a periodic shift of the input shifts the output.
        channel_parallel_inputs: Whether each rank of ``"model_parallel"`` has some channels of the input, as
            :func:`distman.split_sizes` says, instead of all.
        channel_parallel_outputs: The same of the output.

    Raises:
        UndefinedGroupError: There is no group ``"model_parallel"``.
        ValueError: A size is not positive, or ``num_blocks`` does not divide ``embed_dim``. In a later call: the images
            have another shape.

    Example on two ranks:
        >>> manager.create_process_subgroup("model_parallel", 2)
        >>> model = DistributedAFNO((9, 14), in_channels=2, patch_size=4, embed_dim=6, num_blocks=3, depth=1)
        >>> images = torch.ones(5, 2, 9, 14)
        >>> tuple(model(images).shape)
        (5, 2, 9, 14)
    """

    def __init__(
        self,
        inp_shape: Sequence[int],
        in_channels: int,
        out_channels: int | None = None,
        patch_size: int | Sequence[int] = 16,
        embed_dim: int = 256,
        depth: int = 4,
        num_blocks: int = 4,
        *,
        mlp_ratio: float = 4.0,
        sparsity_threshold: float = 0.01,
        positions: bool = True,
        channel_parallel_inputs: bool = False,
        channel_parallel_outputs: bool = False,
    ) -> None:
        super().__init__()
        manager = DistributedManager()
        if _CHANNELS not in manager.group_names:
            raise UndefinedGroupError(
                f"{_CHANNELS!r} must be a group before a DistributedAFNO is made, got {list(manager.group_names)}. "
                f"Call manager.initialize_mesh() with an axis of that name, or "
                f"manager.create_process_subgroup({_CHANNELS!r}, size)."
            )
        self.inp_shape = (inp_shape[0], inp_shape[1])
        self.in_channels = in_channels
        self.out_channels = in_channels if out_channels is None else out_channels
        self.patch_size = (patch_size, patch_size) if isinstance(patch_size, int) else (patch_size[0], patch_size[1])
        self.channel_parallel_inputs = channel_parallel_inputs
        self.channel_parallel_outputs = channel_parallel_outputs
        _check_sizes(
            inp_shape=self.inp_shape,
            in_channels=(in_channels,),
            out_channels=(self.out_channels,),
            patch_size=self.patch_size,
            embed_dim=(embed_dim,),
            num_blocks=(num_blocks,),
        )
        if embed_dim % num_blocks:
            raise ValueError(
                f"num_blocks must divide embed_dim, got {num_blocks} blocks of {embed_dim} channels. Change one."
            )
        rows, columns = (-(-size // patch) for size, patch in zip(self.inp_shape, self.patch_size, strict=True))
        self._tokens = (rows, columns)
        self._token_columns = split_sizes(columns, _size_of(_COLUMNS))
        patch_area = self.patch_size[0] * self.patch_size[1]
        seed = broadcast_data(int(torch.randint(2**62, ())))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds the GPUs too
            self.embed = nn.Linear(in_channels * patch_area, embed_dim)
            self.position = nn.Parameter(0.02 * torch.randn(rows, columns, embed_dim)) if positions else None
            hidden = round(mlp_ratio * embed_dim)
            self.blocks = nn.Sequential(
                *(_Block(embed_dim, hidden, num_blocks, self._tokens, sparsity_threshold) for _ in range(depth))
            )
            self.norm = nn.LayerNorm(embed_dim)
            self.head = nn.Linear(embed_dim, self.out_channels * patch_area)
        if _COLUMNS in manager.group_names:
            mappings.mark_module_as_shared(self, _COLUMNS)

    @property
    def column_sizes(self) -> list[int]:
        """Number of the images' columns on each rank of ``"spatial_parallel"``; all on one where it is no group.

        Example on two ranks:
            >>> manager.initialize_mesh((2, 1), ("spatial_parallel", "model_parallel"))
            DeviceMesh(...)
            >>> model = DistributedAFNO((9, 14), in_channels=2, patch_size=4, embed_dim=6, num_blocks=3, depth=1)
            >>> model.column_sizes  # two patches each, of which the last one reaches beyond the image
            [8, 6]
        """
        width = self.inp_shape[1]
        sizes: list[int] = []
        for tokens in self._token_columns:
            sizes.append(min(tokens * self.patch_size[1], width - sum(sizes)))
        return sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.channel_parallel_inputs:
            sizes = split_sizes(self.in_channels, _size_of(_CHANNELS))
            x = mappings.gather_from_parallel_region(x, 1, sizes, _CHANNELS)
        expected = (self.in_channels, self.inp_shape[0], self.column_sizes[_rank_in(_COLUMNS)])
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"x must be of shape (samples, {', '.join(map(str, expected))}) on this rank, got {tuple(x.shape)}. "
                "Split the columns as column_sizes says."
            )
        tokens = self.embed(self._to_patches(x))
        if self.position is not None:
            tokens = tokens + self.position.split(self._token_columns, dim=1)[_rank_in(_COLUMNS)]
        y = self._from_patches(self.head(self.norm(self.blocks(tokens))))[..., : x.shape[-1]]
        return mappings.scatter_to_parallel_region(y, 1, _CHANNELS) if self.channel_parallel_outputs else y

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the weights of all ranks of ``"model_parallel"``, which any other number of ranks can load.

        Collective over that group.

        Returns:
            Name -> weight, whole and equal on all ranks; the names are those of ``state_dict()``.

        Example on two ranks:
            >>> manager.create_process_subgroup("model_parallel", 2)
            >>> model = DistributedAFNO((9, 14), 2, patch_size=4, embed_dim=6, num_blocks=3, depth=1)
            >>> name = "blocks.0.mix.1.first_bias"
            >>> len(model.whole_state()[name]), all_gather_objects(len(model.state_dict()[name]))
            (3, [2, 1])
        """
        dims = self._split_dims()
        return {
            name: mappings.gather_from_parallel_region(tensor, dims[name], group=_CHANNELS) if name in dims else tensor
            for name, tensor in self.state_dict().items()
        }

    def load_whole_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's slices of what :meth:`whole_state` has returned, on however many ranks.

        Local.

        Args:
            state: Name -> whole weight.

        Raises:
            RuntimeError: Names or shapes are not those of this operator.

        Example on two ranks:
            >>> manager.create_process_subgroup("model_parallel", 2)
            >>> model = DistributedAFNO((9, 14), 2, patch_size=4, embed_dim=6, num_blocks=3, depth=1)
            >>> model.load_whole_state(model.whole_state())
        """
        dims = self._split_dims()
        self.load_state_dict(
            {name: _slice(tensor, dims[name]) if name in dims else tensor for name, tensor in state.items()}
        )

    def _split_dims(self) -> dict[str, int]:
        return {
            f"{path}.{name}": dim
            for path, module in self.named_modules()
            if isinstance(module, (_SpectralMixing, _ParallelMLP))
            for name, dim in module.SPLIT_DIMS.items()
        }

    def _to_patches(self, x: torch.Tensor) -> torch.Tensor:
        """Return (sample, row, column, channel and place within the patch); a convolution refuses no columns."""
        (rows, _), columns = self._tokens, self._token_columns[_rank_in(_COLUMNS)]
        height, width = self.patch_size
        x = nn.functional.pad(x, (0, columns * width - x.shape[3], 0, rows * height - x.shape[2]))
        x = x.reshape(*x.shape[:2], rows, height, columns, width)
        patches: torch.Tensor = x.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return patches

    def _from_patches(self, patches: torch.Tensor) -> torch.Tensor:
        height, width = self.patch_size
        samples, rows, columns, _ = patches.shape
        y = patches.unflatten(3, (self.out_channels, height, width)).permute(0, 3, 1, 4, 2, 5)
        whole: torch.Tensor = y.reshape(samples, self.out_channels, rows * height, columns * width)
        return whole[:, :, : self.inp_shape[0]]


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, num_blocks: int, tokens: tuple[int, int], threshold: float) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.LayerNorm(width), _SpectralMixing(width, num_blocks, tokens, threshold))
        self.mlp = nn.Sequential(nn.LayerNorm(width), _ParallelMLP(width, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        y: torch.Tensor = x + self.mlp(x)
        return y


class _SpectralMixing(nn.Module):
    """Apply one small complex network to every frequency, with its own weights for each block of channels."""

    SPLIT_DIMS: ClassVar = {"first_weight": 0, "first_bias": 0, "second_weight": 0, "second_bias": 0}

    def __init__(self, width: int, num_blocks: int, tokens: tuple[int, int], threshold: float) -> None:
        super().__init__()
        self.num_blocks, self.tokens = num_blocks, tokens
        self.shrink = nn.Softshrink(threshold)
        size = width // num_blocks
        self.first_weight = _keep_slice(0.02 * torch.randn(num_blocks, size, size, 2), dim=0)
        self.first_bias = _keep_slice(torch.zeros(num_blocks, size, 2), dim=0)
        self.second_weight = _keep_slice(0.02 * torch.randn(num_blocks, size, size, 2), dim=0)
        self.second_bias = _keep_slice(torch.zeros(num_blocks, size, 2), dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (self.num_blocks, -1))
        x = mappings.scatter_to_parallel_region(x, -2, _CHANNELS)
        x = self._mix(x)
        sizes = split_sizes(self.num_blocks, _size_of(_CHANNELS))
        return mappings.gather_from_parallel_region(x, -2, sizes, _CHANNELS).flatten(-2)

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        forward, inverse = self._transforms(x)
        modes = forward(x, self.tokens, _TOKEN_DIMS, "ortho")
        modes = _on_parts(nn.functional.relu, _complex_linear(modes, self.first_weight, self.first_bias))
        modes = _on_parts(self.shrink, _complex_linear(modes, self.second_weight, self.second_bias))
        return inverse(modes, self.tokens, _TOKEN_DIMS, "ortho")

    def _transforms(self, x: torch.Tensor) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        if _COLUMNS in DistributedManager().group_names:
            return DistributedRFFT2.apply, DistributedIRFFT2.apply
        if x.numel():
            return torch.fft.rfft2, torch.fft.irfft2
        # MKL transforms nothing empty, and weights that went unused would have no gradient, which DDP refuses.
        return lambda x, *_: torch.complex(x, x), lambda modes, *_: modes.real


class _ParallelMLP(nn.Module):
    """Linear, GELU, Linear, whole on the outside: the first is column-parallel, the second row-parallel."""

    SPLIT_DIMS: ClassVar = {"first_weight": 0, "first_bias": 0, "second_weight": 1}

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        first, second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.first_weight = _keep_slice(first.weight, dim=0)
        self.first_bias = _keep_slice(first.bias, dim=0)
        self.second_weight = _keep_slice(second.weight, dim=1)
        self.second_bias = second.bias  # added once, after the sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = mappings.copy_to_parallel_region(x, _CHANNELS)
        hidden = nn.functional.gelu(nn.functional.linear(x, self.first_weight, self.first_bias))
        part = nn.functional.linear(hidden, self.second_weight)
        return mappings.reduce_from_parallel_region(part, _CHANNELS) + self.second_bias


def _check_sizes(**sizes: tuple[int, ...]) -> None:
    for name, values in sizes.items():
        if min(values) < 1:
            got = values[0] if len(values) == 1 else values
            raise ValueError(f"{name} must be positive, got {got}. Correct it.")


def _size_of(group: str) -> int:
    manager = DistributedManager()
    return manager.group_size(group) if group in manager.group_names else 1


def _rank_in(group: str) -> int:
    manager = DistributedManager()
    return manager.group_rank(group) if group in manager.group_names else 0


def _complex_linear(modes: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...bi,bio->...bo", modes, torch.view_as_complex(weight)) + torch.view_as_complex(bias)


def _on_parts(function: Callable[[torch.Tensor], torch.Tensor], modes: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(function(torch.view_as_real(modes)))


def _slice(full: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's slice of a weight; on whatever device it is."""
    parts: tuple[torch.Tensor, ...] = full.detach().split(split_sizes(full.shape[dim], _size_of(_CHANNELS)), dim)
    return parts[_rank_in(_CHANNELS)].clone()


def _keep_slice(full: torch.Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(_slice(full, dim))
