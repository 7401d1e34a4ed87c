"""Which package does a line of Python come from? A BERT of transformers learns to tell.

python -m pip install transformers
eventloop fit examples/hf_text.py
eventloop fit examples/hf_text.py --task.width 128 --task.depth 4 --max-duration 10ep

The model is made from a configuration, and the lines are those of packages of the standard library, so
that nothing is downloaded. Batches are mappings, whose entries are the model's arguments, and the
outputs have a loss of their own: such a task needs neither `loss` nor `forward`.
"""

# B = batch, T = position in the line

import re
import sysconfig
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, TaskError, schedules

try:
    from transformers import BertConfig, BertForSequenceClassification
except ModuleNotFoundError as error:
    raise TaskError(
        "this example trains a model of transformers, which isn't installed",
        fix="python -m pip install transformers",
    ) from error

PACKAGES = (
    "asyncio", "ctypes", "email", "http", "importlib", "logging", "multiprocessing", "unittest"
)  # fmt: skip
PADDING, START, NUM_TOKENS = 0, 1, 4096
MAX_LENGTH = 32


class Lines(Dataset[dict[str, Tensor]]):
    """The lines of some packages, each with the package's number as its label.

    Args:
        packages: folders of the standard library.
        max_lines: how many lines of each to take at most; blank, short and repeated ones aren't.
    """

    def __init__(self, packages: tuple[str, ...], max_lines: int) -> None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        self.lines: list[tuple[str, int]] = []
        for label, package in enumerate(packages):
            files = sorted((stdlib / package).glob("*.py"))
            texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
            lines = dict.fromkeys(line.strip() for text in texts for line in text.splitlines())
            long = [line for line in lines if len(line) >= 20]
            self.lines += [(line, label) for line in long[:max_lines]]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        line, label = self.lines[idx]
        input_ids_T = torch.full((MAX_LENGTH,), PADDING)
        tokens_T = torch.tensor(tokenize(line)[:MAX_LENGTH])
        input_ids_T[: len(tokens_T)] = tokens_T
        return {
            "input_ids": input_ids_T,
            "attention_mask": (input_ids_T != PADDING).long(),
            "labels": torch.tensor(label),
        }


def tokenize(line: str) -> list[int]:
    """Returns a number for each word and sign; some words share one, of those that nobody reserved."""
    words = re.findall(r"\w+|[^\w\s]", line)
    return [START, *(START + 1 + crc32(word.encode()) % (NUM_TOKENS - 2) for word in words)]


def make_model(width: int, depth: int) -> BertForSequenceClassification:
    """A BERT over words, with random weights."""
    config = BertConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=PADDING,
        num_labels=len(PACKAGES),
    )
    return BertForSequenceClassification(config)


def task(
    lr: float = 1e-3,
    batch_size: int = 32,
    width: int = 64,
    depth: int = 2,
    max_lines: int = 1000,
) -> Task:
    """Says what is trained; each parameter is an option, `--task.lr` and so on.

    Args:
        lr: highest learning rate, after the warm-up; it falls to zero in a straight line.
        batch_size: lines a step.
        width: channels of the model, a multiple of 32, which is what a head has.
        depth: number of layers.
        max_lines: how many lines of each package to take at most.
    """
    lines = Lines(PACKAGES, max_lines)
    train, test = random_split(lines, [0.9, 0.1], torch.Generator().manual_seed(0))
    return Task(
        model=lambda: make_model(width, depth),
        train_dataloader=DataLoader(train, batch_size, shuffle=True),
        eval_dataloaders={"test": DataLoader(test, 256)},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr, fused=True),
        scheduler=schedules.linear(warmup="0.1dur"),
        metrics={"accuracy": MulticlassAccuracy(len(PACKAGES), average="micro")},
        num_tokens=lambda batch: int(batch["attention_mask"].sum()),
        settings={"max_duration": "3ep"},
    )
