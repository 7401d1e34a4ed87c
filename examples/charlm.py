"""A small GPT that learns, character by character, to write Python as its standard library does.

eventloop fit examples/charlm.py
eventloop fit examples/charlm.py --task.width 256 --max-duration 2e7tok --precision bf16

The text is on every machine that runs Python. A character is a token: the length of the run, its
learning rates and its evaluations are counted in them. The run as it stands takes a minute of one
core and ends near 2.1 bits a character. On a machine that is busy, OMP_NUM_THREADS=1 keeps threads
from waiting for each other.
"""

# B = batch, T = position in the text, C = channel, H = head, V = character

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from eventloop import Task, schedules

NUM_CHARACTERS = 128  # ASCII; anything else is read as "?"
HELD_OUT = 16  # one file of so many is kept to evaluate on


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        # Head after head, so that ranks which share a layer have whole ones (eventloop-tp).
        heads_BTH3C = self.qkv(x_BTC).unflatten(-1, (-1, 3, self.head_width))
        q_BHTC, k_BHTC, v_BHTC = (part.transpose(1, 2) for part in heads_BTH3C.unbind(-2))
        mixed_BHTC = scaled_dot_product_attention(
            rotated(q_BHTC), rotated(k_BHTC), v_BHTC, is_causal=True
        )
        return self.out(mixed_BHTC.transpose(1, 2).flatten(2))


def rotated(x_BHTC: Tensor) -> Tensor:
    """Turns pairs of channels by their position, so that q * k depends on how far apart they are.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2, for texts of up to about 1,000 characters.
    """
    length, half = x_BHTC.shape[-2], x_BHTC.shape[-1] // 2
    speeds_C = 1000.0 ** -(torch.arange(half, device=x_BHTC.device) / half)
    angles_TC = torch.arange(length, device=x_BHTC.device)[:, None] * speeds_C
    cos_TC, sin_TC = angles_TC.cos().to(x_BHTC.dtype), angles_TC.sin().to(x_BHTC.dtype)
    a_BHTC, b_BHTC = x_BHTC.chunk(2, dim=-1)
    return torch.cat([a_BHTC * cos_TC - b_BHTC * sin_TC, a_BHTC * sin_TC + b_BHTC * cos_TC], dim=-1)


class Block(nn.Module):
    """Attention, then a network of its own for each position; both add to what is there."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, num_heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(x_BTC)
        return x_BTC + self.mlp(x_BTC)


class GPT(nn.Module):
    """Gives the logits of the next character at each position: (B, T) in, (B, T, V) out."""

    tp_plan = {
        "blocks.*.attention.1.qkv": "colwise",
        "blocks.*.attention.1.out": "rowwise",
        "blocks.*.mlp.1": "colwise",
        "blocks.*.mlp.3": "rowwise",
    }

    def __init__(self, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(NUM_CHARACTERS, width)
        nn.init.normal_(self.characters.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CHARACTERS, bias=False)

    def forward(self, characters_BT: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(characters_BT))))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text in pieces of `context` characters, each with the characters that follow them."""

    def __init__(self, files: list[Path], context: int) -> None:
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        self.text = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        start = idx * self.context
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class BitsPerCharacter(Metric):
    """The mean of -log2 of the probability that each character was given; 7 for a blind guess."""

    higher_is_better = False
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits_BTV: Tensor, targets_BT: Tensor) -> None:
        self.nats += next_character_loss(logits_BTV.float(), targets_BT) * targets_BT.numel()
        self.count += targets_BT.numel()

    def compute(self) -> Tensor:
        return self.nats / self.count / math.log(2)


def next_character_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean of -log of the probability that each character was given."""
    return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay for the matrices alone."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def task(
    lr: float = 2e-3,
    batch_size: int = 16,
    width: int = 128,
    depth: int = 2,
    context: int = 64,
    num_files: int | None = None,
    held_out: int = 0,
) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: highest learning rate, after the warm-up; it falls to a tenth of it, along a cosine.
        batch_size: pieces of text a step.
        width: channels of the model, a multiple of 32, which is what a head has.
        depth: number of blocks.
        context: characters that the model sees at once.
        num_files: how many modules of the standard library to read; not set: all.
        held_out: which sixteenth of them is kept to evaluate on, 0 to 15.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    train = Windows([one for idx, one in enumerate(files) if idx % HELD_OUT != held_out], context)
    test = Windows(files[held_out::HELD_OUT], context)
    return Task(
        model=lambda: GPT(width, depth, width // 32),
        loss=next_character_loss,
        train_dataloader=DataLoader(train, batch_size, shuffle=True),
        eval_dataloaders={"held_out": DataLoader(test, 64)},
        optimizer=lambda model: make_optimizer(model, lr),
        scheduler=schedules.cosine(warmup="0.05dur", final_frac=0.1),
        metrics={"bits": BitsPerCharacter()},
        num_tokens=lambda inputs: inputs.numel(),
        settings={"max_duration": "1e6tok", "eval_interval": "0.25dur", "clip_norm": 1.0},
    )
