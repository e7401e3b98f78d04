"""The vision models of the frontier bench: ViT, ResNets with activations in place, and a U-Net with long skips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from frontier_blocks import Add, Block, Case, Chain, Concat, blocks_of
from torch import nn


class Vision(nn.Module):
    def __init__(self, width: int, patch: int, side: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.chain, self.norm, self.head = Chain(blocks), nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.chain(x)).mean(1))  # type: ignore[no-any-return]


def _classes(model: nn.Module, batch: int, side: int, *chains: str) -> Case:
    images, classes = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
    return Case(model, (images,), lambda y: F.cross_entropy(y, classes), blocks_of(model, *chains), chains)


def vit(dropout: float = 0.0) -> Case:
    blocks: list[nn.Module] = [Block(128, 4, causal=False, dropout=dropout) for _ in range(6)]
    return _classes(Vision(128, 8, 64, blocks), 16, 64, "chain")


def vit_dropout() -> Case:
    return vit(0.1)


class BasicBlock(nn.Module):
    """ResNet's block with activations in place; `inner` > 0 makes it a bottleneck."""

    def __init__(self, width_in: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        inner = width // 4 if bottleneck else width
        shapes = [(width_in, inner, 1), (inner, inner, 3), (inner, width, 1)]
        shapes = shapes if bottleneck else [(width_in, width, 3), (width, width, 3)]
        strides = [1, stride, 1] if bottleneck else [stride, 1]
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, s, k // 2, bias=False) for (i, o, k), s in zip(shapes, strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in shapes)
        self.relus = nn.ModuleList(nn.ReLU(inplace=True) for _ in shapes)
        plain = stride == 1 and width_in == width
        self.shortcut = (
            nn.Identity()
            if plain
            else nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )
        self.add = Add()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (conv, norm, relu) in enumerate(zip(self.convs, self.norms, self.relus, strict=True)):
            y = norm(conv(y))
            y = relu(y) if i < len(self.convs) - 1 else relu(self.add(y, self.shortcut(x)))
        return y


class ResNet(nn.Module):
    def __init__(self, depths: list[int], width: int, *, bottleneck: bool) -> None:
        super().__init__()
        wide = 4 if bottleneck else 1
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        width_in = width
        for level, depth in enumerate(depths):
            for i in range(depth):
                out = width * 2**level * wide
                blocks.append(BasicBlock(width_in, out, 2 if level and not i else 1, bottleneck=bottleneck))
                width_in = out
        self.chain, self.head = Chain(blocks), nn.Linear(width_in, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.chain(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


def resnet18() -> Case:
    return _classes(ResNet([2, 2, 2, 2], 16, bottleneck=False), 16, 128, "chain")


def resnet50() -> Case:
    return _classes(ResNet([3, 4, 6, 3], 16, bottleneck=True), 8, 128, "chain")


class ConvBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width_in, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.silu1, self.silu2 = nn.SiLU(), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.silu1(self.norm1(self.conv1(x)))
        return self.silu2(self.norm2(self.conv2(x)))  # type: ignore[no-any-return]


class UpBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.up, self.concat, self.convs = nn.Upsample(scale_factor=2), Concat(), ConvBlock(width_in + width, width)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.convs(self.concat(self.up(x), skip))  # type: ignore[no-any-return]


class UNet(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.down = nn.ModuleList(ConvBlock(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(UpBlock(i, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(x, skips.pop())
        return self.head(x)  # type: ignore[no-any-return]


def unet() -> Case:
    model = UNet([16, 32, 64, 128])
    images = torch.randn(4, 3, 64, 64)
    blocks = [f"down.{i}" for i in range(4)] + [f"up.{i}" for i in range(3)]
    return Case(model, (images,), lambda y: F.mse_loss(y, images), tuple(blocks))
