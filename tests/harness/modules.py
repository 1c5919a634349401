"""Small modules of the kinds that users bring: convolutions, attention, recurrent nets, diffusion, two inputs, a dict.

``FACTORIES`` names the functions for ``model.factory``. Samples are random, the same in every process. Nothing divides
by the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
ITEMS = 48


class Items(torch.utils.data.Dataset[Batch]):
    """Samples with tensors of these shapes and dtypes; whole numbers are below 5."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Batch:
        chance = torch.Generator().manual_seed(index)
        return {name: self._tensor(shape, dtype, chance) for name, (shape, dtype) in self.shapes.items()}

    @staticmethod
    def _tensor(shape: tuple[int, ...], dtype: torch.dtype, chance: torch.Generator) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=chance, dtype=dtype)
        return torch.randint(0, 5, shape, generator=chance, dtype=dtype)


def classes(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    logits = model(*(value for name, value in batch.items() if name != "labels"))
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def of_dict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    logits = model({name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def squares(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


IMAGE: Shapes = {"x": ((3, 10, 10), torch.float32), "labels": ((), torch.int64)}


class ConvBlock(nn.Module):
    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 9, 3)
        self.blocks = nn.ModuleList(ConvBlock(9, norm(9)) for _ in range(2))
        self.leave = nn.Linear(9, 5)

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((2, 3)))


def batch_norm() -> Any:
    return ConvNet(nn.BatchNorm2d), classes, Items(IMAGE)


def group_norm() -> Any:
    return ConvNet(lambda width: nn.GroupNorm(3, width)), classes, Items(IMAGE)


def instance_norm() -> Any:
    norm = nn.InstanceNorm2d
    return ConvNet(lambda w: norm(w, affine=True, track_running_stats=True)), classes, Items(IMAGE)


class Rotary(nn.Module):
    """Attention whose rotary tables are fp32 buffers, so that queries and keys are fp32 and values are not."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.tokens = heads, tokens
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.register_buffer("cos", torch.empty(tokens, width // heads), persistent=False)
        self.register_buffer("sin", torch.empty(tokens, width // heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        half = self.cos.shape[1] // 2
        angles = torch.outer(torch.arange(self.tokens), 100.0 ** -(torch.arange(half) / half)).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (
            a * self.cos + torch.cat([-a.chunk(2, -1)[1], a.chunk(2, -1)[0]], -1) * self.sin for a in (q, k)
        )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.leave = nn.Conv2d(3, 12, 5, stride=5), nn.Linear(12, 5)
        self.place = Place(12)
        self.blocks = nn.ModuleList(Rotary(12, 2, 5) for _ in range(2))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.place(self.patch(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.leave(x[:, 0])


class Place(nn.Module):
    """A class token and learned positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.positions = (
            nn.Parameter(torch.empty(1, 1, width)),
            nn.Parameter(torch.empty(1, 5, width)),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token, std=0.5)
        nn.init.normal_(self.positions, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions


def vit() -> Any:
    return ViT(), classes, Items(IMAGE)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.SiLU(), nn.Linear(13, 7)) for _ in range(3)
        )

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def regression() -> Any:
    return Regression(), squares, Items({"x": ((7,), torch.float32), "y": ((7,), torch.float32)})


def double_inputs() -> Any:
    """Inputs and targets as NumPy makes them."""
    return Regression(), squares, Items({"x": ((7,), torch.float64), "y": ((7,), torch.float64)})


class UNet(nn.Module):
    """A denoiser: sines of fp32 timesteps, transposed convolution, skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 6))
        self.enter, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.leave = nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(4, device=t.device) / 4)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        skip = self.enter(x)
        deep = F.silu(self.norm(self.down(skip)) + embedded[:, :, None, None])
        return self.leave(torch.cat([skip, self.up(deep)], 1))


def denoising(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return (model(batch["x"], 100 * batch["t"].abs()) - batch["noise"]).square().sum(), batch["noise"].numel()


def diffusion() -> Any:
    shapes: Shapes = {
        "x": ((3, 8, 8), torch.float32),
        "t": ((), torch.float32),
        "noise": ((3, 8, 8), torch.float32),
    }
    return UNet(), denoising, Items(shapes)


class Speech(nn.Module):
    """A spectrogram by a fixed buffer, 1-D convolutions and recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = Filters(6, 9)
        self.conv, self.norm = nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8)
        self.lstm, self.gru = nn.LSTM(8, 7, batch_first=True), nn.GRU(7, 6)
        self.direct, self.leave = nn.RNN(6, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        sound = torch.log1p(self.filters(x[:, None]).abs())
        x = self.lstm(self.norm(self.conv(sound)).transpose(1, 2))[0]
        return self.leave(self.gru(x.transpose(0, 1))[1][0] + self.direct(sound.transpose(1, 2))[0].mean(1))


class Filters(nn.Module):
    def __init__(self, count: int, length: int) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(count, 1, length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        number, at = torch.meshgrid(
            torch.arange(self.bank.shape[0]), torch.arange(self.bank.shape[2]), indexing="ij"
        )
        self.bank.copy_(torch.cos(number * at).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.bank, stride=2)


def speech() -> Any:
    return Speech(), classes, Items({"x": ((60,), torch.float32), "labels": ((), torch.int64)})


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Sequential(nn.Conv1d(2, 6, 3), nn.PReLU(), nn.Flatten(), nn.Linear(48, 6))
        self.compare = nn.Bilinear(6, 6, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.compare(self.side(left), self.side(right))


def siamese() -> Any:
    sides: Shapes = dict.fromkeys(("left", "right"), ((2, 10), torch.float32))
    return Siamese(), classes, Items({**sides, "labels": ((), torch.int64)})


@dataclass
class Answer:
    logits: Tensor


class Mixed(nn.Module):
    """Takes a dict of ids and images, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.image = nn.Embedding(5, 8), nn.Conv3d(1, 8, 2)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(8, 5)

    def units(self) -> list[nn.Module]:
        return [self.layer]

    def forward(self, given: dict[str, Tensor]) -> Answer:
        seen = self.image(given["image"]).flatten(2).transpose(1, 2)
        read = self.words(given["ids"])
        x = self.attend(read, seen, seen, need_weights=False)[0]
        return Answer(self.leave(self.layer(x).mean(1)))


def mixed() -> Any:
    shapes: Shapes = {
        "ids": ((6,), torch.int64),
        "image": ((1, 3, 3, 3), torch.float32),
        "labels": ((), torch.int64),
    }
    return Mixed(), of_dict, Items(shapes)


class Functional(nn.Module):
    """Its own weights in functions, complex buffers, a Fourier transform, and a tensor that it makes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.matrix = nn.Parameter(torch.empty(4, 3, 3, 3)), nn.Parameter(torch.empty(4, 5))
        self.register_buffer("turn", torch.empty(8, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.kernel, std=0.3)
        nn.init.normal_(self.matrix, std=0.3)
        self.turn.copy_(torch.polar(torch.ones(8), torch.arange(8) / 3))

    def forward(self, x: Tensor, phase: Tensor) -> Tensor:
        x = F.conv2d(x, self.kernel)
        turned = torch.fft.fft(x.flatten(2).mean(1))[:, :8] * self.turn * phase
        weights = torch.softmax(torch.linspace(0, 1, 4, device=x.device), 0)
        return torch.einsum("bchw,c,cd->bd", x, weights, self.matrix) + turned.real[:, :5]


def functional() -> Any:
    return (
        Functional(),
        classes,
        Items(
            {
                "x": ((3, 6, 6), torch.float32),
                "phase": ((8,), torch.complex64),
                "labels": ((), torch.int64),
            }
        ),
    )


class TwoTowers(nn.Module):
    """Images and words; a temperature without dimensions, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten())
        self.enter, self.words = nn.Linear(96, 6), nn.EmbeddingBag(5, 6)
        self.temperature = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.image[0].reset_parameters()
        self.enter.reset_parameters()
        self.words.reset_parameters()
        nn.init.constant_(self.temperature, 0.5)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        seen = F.normalize(self.enter(self.image(image)), dim=-1)
        return self.temperature.exp() * seen @ F.normalize(self.words(ids), dim=-1).T


def both_ways(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits = model(batch["image"], batch["ids"])
    pairs = torch.arange(len(logits), device=logits.device)
    losses = F.cross_entropy(logits, pairs, reduction="sum") + F.cross_entropy(
        logits.T, pairs, reduction="sum"
    )
    return losses, 2 * len(logits)


def contrastive() -> Any:
    shapes: Shapes = {"image": ((3, 10, 10), torch.float32), "ids": ((4,), torch.int64)}
    return TwoTowers(), both_ways, Items(shapes)


FACTORIES = (
    "batch_norm",
    "group_norm",
    "instance_norm",
    "vit",
    "regression",
    "double_inputs",
    "diffusion",
    "speech",
    "siamese",
    "mixed",
    "functional",
    "contrastive",
)


def with_large_weights(model: nn.Module) -> nn.Module:
    """The model in evaluation mode with matrices that are large enough for answers to differ."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25, generator=generator)
    return model.eval()
