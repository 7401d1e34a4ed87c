"""What gpu_step.py trains: three networks, written plainly, each with data and optimizer."""

# B = batch, T = position in the text, C = channel, H = head, V = token

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A network, and what it is trained with.

    Args:
        batch_size: samples a step, unless somebody wants another number.
        make_batch: gives inputs and targets on the host, for a batch size and a generator.
        is_convolutional: whether channels_last is for it.
    """

    name: str
    batch_size: int
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    is_convolutional: bool = True


def workloads(*, tiny: bool = False) -> dict[str, Workload]:
    """Returns the workloads by name.

    Args:
        tiny: the same shapes of network, so small that a CPU is done in a blink.
    """
    gpt = GPTSize(97, 16, 32, 2, 4) if tiny else GPTSize(50_304, 1024, 768, 12, 12)
    depths = (1, 1, 1, 1) if tiny else (3, 4, 6, 3)
    width, num_classes, image_size = (4, 10, 32) if tiny else (64, 1000, 224)
    made = (
        Workload(
            "small_cnn", 4 if tiny else 64, small_cnn, images(32, 10), sgd
        ),
        Workload(
            "resnet50", 2 if tiny else 256, lambda: ResNet(depths, width, num_classes),
            images(image_size, num_classes), sgd,
        ),
        Workload(
            "gpt2", 2 if tiny else 16, lambda: GPT(gpt), texts(gpt), adamw,
            loss=next_token_loss, is_convolutional=False,
        ),
    )  # fmt: skip
    return {one.name: one for one in made}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)


def images(size: int, num_classes: int) -> Callable[[int, torch.Generator], Batch]:
    """Returns what makes batches of images, (B, 3, size, size), with a class each."""

    def make_batch(batch_size: int, generator: torch.Generator) -> Batch:
        shape = (batch_size, 3, size, size)
        targets_B = torch.randint(num_classes, (batch_size,), generator=generator)
        return torch.randn(shape, generator=generator), targets_B

    return make_batch


def small_cnn() -> nn.Module:
    """A network of 32x32 images whose kernels take less time than their launches."""
    channels = (3, 16, 16, 32, 32, 64, 64)
    layers: list[nn.Module] = []
    for idx, (before, after) in enumerate(itertools.pairwise(channels)):
        layers += conv_norm(before, after, 3, stride=1 + idx % 2)
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def conv_norm(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return (
        nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(after),
    )


class Bottleneck(nn.Module):
    """Three convolutions beside a short cut: narrow, 3x3, wide."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *conv_norm(before, width, 1), nn.ReLU(inplace=True),
            *conv_norm(width, width, 3, stride), nn.ReLU(inplace=True),
            *conv_norm(width, after, 1),
        )  # fmt: skip
        is_same = before == after and stride == 1
        self.short_cut = (
            nn.Identity() if is_same else nn.Sequential(*conv_norm(before, after, 1, stride))
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.relu(self.body(x_BCHW) + self.short_cut(x_BCHW))


class ResNet(nn.Module):
    """A residual network; with depths 3, 4, 6, 3 and width 64 it has the shape of ResNet-50.

    Source: He et al. 2016, arXiv:1512.03385, table 1, with the stride in the 3x3 convolution.
    """

    def __init__(self, depths: tuple[int, ...], width: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *conv_norm(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, before = [], width
        for stage, depth in enumerate(depths):
            for idx in range(depth):
                narrow = width * 2**stage
                blocks.append(Bottleneck(before, narrow, 2 if stage and idx == 0 else 1))
                before = 4 * narrow
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x_BCHW)).mean((2, 3)))


@dataclass(frozen=True)
class GPTSize:
    """How large a GPT is: tokens it knows, positions it sees, channels, blocks, heads."""

    num_tokens: int
    context: int
    width: int
    depth: int
    num_heads: int


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTC, k_BHTC, v_BHTC = (
            part_BTC.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part_BTC in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        mixed_BHTC = scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, is_causal=True)
        return self.out(mixed_BHTC.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a network of its own for each position; both add to what is there."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        width = size.width
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(size))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"),
            nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(x_BTC)
        return x_BTC + self.mlp(x_BTC)


class GPT(nn.Module):
    """GPT-2's shape: (B, T) in, logits (B, T, V) out; the last layer has the first one's weights.

    124 million parameters with 12 blocks of 768 channels. The tokens are padded to a multiple of
    128, as matrix units like them.
    """

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.num_tokens, size.width)
        self.positions = nn.Parameter(torch.empty(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.num_tokens, bias=False)
        self.head.weight = self.tokens.weight
        for param in self.parameters():
            if param.ndim > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.tokens(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTC)))


def texts(size: GPTSize) -> Callable[[int, torch.Generator], Batch]:
    """Returns what makes batches of random texts, each with the tokens that follow."""

    def make_batch(batch_size: int, generator: torch.Generator) -> Batch:
        shape = (batch_size, size.context + 1)
        tokens_BT = torch.randint(size.num_tokens, shape, generator=generator)
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    return make_batch


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean of -log of the probability that each token was given."""
    return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
