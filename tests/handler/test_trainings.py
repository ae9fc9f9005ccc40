"""Six trainings that a user would write from the documentation: as on one process, and resumed exactly after a cut."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from distman import DistributedManager
from distman.collectives import broadcast_data
from distman.errors import CheckpointError
from distman.handler import Callback, NNHandler
from distman.testing import ranks

DOUBLE = torch.float64


class CutOffError(Exception):
    pass


class Cut(Callback):
    """Stand for a job that ends after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, handler, step):
        if step == self.step:
            raise CutOffError


def per_rank(num_samples):
    return num_samples // DistributedManager().world_size


class Boxes(Dataset):
    """Images with one to three squares, and where these are."""

    def __len__(self):
        return 26

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        image = 0.1 * torch.randn(1, 16, 16, generator=numbers, dtype=DOUBLE)
        boxes = []
        for _ in range(int(torch.randint(1, 4, (1,), generator=numbers))):
            x, y = torch.randint(0, 12, (2,), generator=numbers).tolist()
            image[0, y : y + 4, x : x + 4] += 1
            boxes.append((x + 2.0, y + 2.0))
        return image, boxes


def collate(samples):
    images, boxes = zip(*samples, strict=True)
    return torch.stack(images), list(boxes)


def detection_loss(grids, targets):
    total = 0
    for grid, boxes in zip(grids, targets, strict=True):
        is_there = torch.zeros(4, 4, dtype=DOUBLE)
        for x, y in boxes:
            row, column = int(y // 4), int(x // 4)
            is_there[row, column] = 1
            total += (grid[1, row, column] - x / 16) ** 2 + (grid[2, row, column] - y / 16) ** 2
        total += functional.binary_cross_entropy_with_logits(grid[0], is_there, reduction="sum")
    return total / sum(map(len, targets))


def detector():
    """The loss is a mean over boxes, of which each image has its own number."""

    def make():
        layers = nn.Conv2d(1, 8, 3, 2, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, 2, padding=1)
        return nn.Sequential(*layers).to(DOUBLE)

    handler = NNHandler(make, seed=1)
    handler.set_optimizer(torch.optim.AdamW, lr=0.01)
    handler.set_loss_fn(detection_loss, num_samples=lambda batch: sum(map(len, batch[1])))
    handler.set_train_loader(Boxes(), batch_size=per_rank(12), collate_fn=collate)
    handler.set_val_loader(Boxes(), batch_size=5, collate_fn=collate)
    return handler, lambda: handler.train(3, ema_decay=0.9)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs):
        queries, keys, values = self.queries(self.before(inputs)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        inputs = inputs + self.out(seen.transpose(1, 2).flatten(2))
        return inputs + self.wide(self.after(inputs))


class Transformer(nn.Module):
    def __init__(self, width=16, num_letters=28, longest=24):
        super().__init__()
        self.letters, self.places = nn.Embedding(num_letters, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.out = nn.Linear(width, num_letters, bias=False)

    def forward(self, text):
        return self.out(self.blocks(self.letters(text) + self.places(torch.arange(text.shape[1]))))


TEXT = "the quick brown fox jumps over the lazy dog and the cat sat on the mat while it rained in spain"
WORDS = ["".join(words) for words in zip(TEXT.split(), TEXT.split()[1:], TEXT.split()[2:])]  # noqa: B905
TEXTS = [torch.tensor([ord(letter) - 96 for letter in word]) for word in WORDS]


def warm_up(step):
    return min(1.0, (step + 1) / 3) * 0.97**step


def language_model(make=lambda: Transformer().to(DOUBLE), **options):
    """The loss is a mean over the letters of texts of unlike lengths."""

    def loss(logits, text):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten(), ignore_index=0)

    handler = NNHandler(make, seed=2, **options)
    handler.set_optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    handler.set_scheduler(torch.optim.lr_scheduler.LambdaLR, lr_lambda=warm_up, per="step")
    handler.set_loss_fn(
        loss,
        forward=lambda model, text: (model(text), text),
        num_samples=lambda text: int((text[:, 1:] > 0).sum()),
    )
    handler.set_train_loader(
        TEXTS, batch_size=per_rank(6), collate_fn=lambda texts: pad_sequence(texts, batch_first=True)
    )
    return handler, lambda: handler.train(4, accumulate=2, clip_norm=1.0, ema_decay=0.95)


def made_as_it_is_sharded():
    """A model that no rank makes as a whole."""

    def make():
        with torch.device("meta"):
            return Transformer().to(DOUBLE)

    @torch.no_grad()
    def initialize(module):
        for parameter in module.parameters(recurse=False):
            numbers = torch.Generator().manual_seed(parameter.numel())
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=numbers, dtype=DOUBLE))

    return language_model(make, strategy="fsdp", strategy_options={"shard": Block, "initialize": initialize})


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(2, 3, dtype=DOUBLE), nn.Linear(3, 1, dtype=DOUBLE)

    def forward(self, latents):
        return self.generator(latents)


def compete(stepper, batch):
    latents, real = batch
    generator, discriminator = stepper.module.generator, stepper.module.discriminator
    fake = generator(latents)
    judged = functional.softplus(-discriminator(real)).mean() + functional.softplus(discriminator(fake.detach())).mean()
    stepper.backward(judged, "discriminator")
    stepper.step("discriminator")
    fooled = functional.softplus(-discriminator(fake)).mean()
    stepper.backward(fooled, "generator")
    stepper.step("generator")
    return {"judged": judged, "loss": fooled}


def adversaries():
    """First the generator alone, with a loss of its own; then both."""
    numbers = torch.Generator().manual_seed(0)
    real = torch.rand(65, 3, generator=numbers, dtype=DOUBLE)
    latents = torch.randn(65, 2, generator=numbers, dtype=DOUBLE)
    handler = NNHandler(Adversaries, seed=3)
    handler.set_train_loader(TensorDataset(latents, real), batch_size=per_rank(12))

    def train():
        handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda model: model.generator.parameters())
        handler.set_loss_fn(functional.mse_loss)
        handler.module.discriminator.requires_grad_(False)  # noqa: FBT003 - torch's
        handler.train(1)
        handler.module.discriminator.requires_grad_(True)  # noqa: FBT003 - torch's
        for name, rate in (("generator", 0.01), ("discriminator", 0.02)):
            parameters = lambda model, name=name: getattr(model, name).parameters()  # noqa: E731
            handler.set_optimizer(torch.optim.Adam, name=name, lr=rate, parameters=parameters)
        handler.set_step(compete)
        return handler.train(3, ema_decay=0.99)

    return handler, train


INPUTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
SUMS = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))


def make_network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DOUBLE)


def loader_of_torchdata():
    manager = DistributedManager()
    handler = NNHandler(make_network, seed=5)
    handler.set_optimizer(torch.optim.RMSprop, lr=0.01)
    handler.set_loss_fn(functional.mse_loss)
    sampler = DistributedSampler(SUMS, manager.world_size, manager.rank, seed=4)
    handler.set_train_loader(StatefulDataLoader(SUMS, per_rank(12), sampler=sampler, num_workers=1))
    return handler, lambda: handler.train(3)


def from_lightning(tmp_path):
    """The checkpoint of a LightningModule whose attribute ``net`` is the model."""
    path = tmp_path / "lightning.ckpt"
    if DistributedManager().is_main:
        torch.manual_seed(9)
        weights = {f"net.{name}": value for name, value in make_network().state_dict().items()}
        torch.save({"epoch": 3, "state_dict": weights, "optimizer_states": [{}], "loops": {}}, path)
    DistributedManager().barrier()
    handler = NNHandler(make_network, seed=5)
    with pytest.raises(CheckpointError, match=r"a file of Lightning, .* by handler\.load\(path, only='model'\)"):
        handler.load(path)
    handler.load(path, only="model")
    handler.set_optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
    handler.set_loss_fn(functional.mse_loss)
    handler.set_train_loader(SUMS, batch_size=per_rank(12))
    return handler, lambda: handler.train(3)


LOSSES = {
    "detector": 4.994633769492531,
    "language_model": 2.7931493155673888,
    "made_as_it_is_sharded": 3.0216566931292324,
    "adversaries": 0.5804229521988624,
    "loader_of_torchdata": 0.3046848610298584,
    "from_lightning": 0.8110915025069292,
}
"""What one process comes to, in the last epoch."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@ranks(1, 2)
@pytest.mark.parametrize(
    "make", [detector, language_model, made_as_it_is_sharded, adversaries, loader_of_torchdata, from_lightning]
)
def test_a_training_is_that_of_one_process_and_resumed_exactly(make, world_size, tmp_path):
    folder = broadcast_data(str(tmp_path / "saved"))
    arguments = [tmp_path] if make is from_lightning else []
    handler, train = make(*arguments)
    whole = train()
    assert math.isclose(whole["loss"][-1], LOSSES[make.__name__], rel_tol=1e-9)

    cut = random.Random(f"{make.__name__} {world_size}").randrange(1, handler.num_steps)  # noqa: S311 - no secret
    handler, train = make(*arguments)
    handler.auto_save(folder, every_steps=max(cut - 1, 1))
    handler.add_callback(Cut(cut))
    with pytest.raises(CutOffError):
        train()
    handler, train = make(*arguments)
    handler.auto_save(folder)
    assert repr(train()["loss"]) == repr(whole["loss"])
