"""Sequences of log-normal lengths in microbatches: padded each by itself, and sliced from a padded batch.

    python benchmarks/lengths.py [--epochs 7] [--json]

A transformer's encoder layer is trained on batches of 64 sequences in microbatches of 4, on the CPU and in one
thread. An epoch by a loop written by hand that pads each microbatch, one by `Trainer.fit` with
`collated(pad, microbatch_size=4)` and one with `microbatch_size=4` take turns; each column has the median of
the ratios of neighbours, of the processor's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from eventloop import Task, Trainer
from eventloop.data import collated

NUM_BATCHES, BATCH_SIZE, SIZE = 8, 64, 4
WIDTH = 64


class Encoder(nn.Module):
    """Classifies sequences by the mean of what one layer of attention makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits, shape (N, 3), for ids of shape (N, T), padded with 0."""
        is_word = ids != 0
        hidden = self.layer(self.words(ids), src_key_padding_mask=~is_word)
        outputs: Tensor = self.head((hidden * is_word[..., None]).sum(1) / is_word.sum(1, True))
        return outputs


def samples() -> list[Tensor]:
    """Makes sequences whose median is 20 words."""
    lengths = torch.randn(NUM_BATCHES * BATCH_SIZE).mul(0.8).add(3).exp().int().clamp(1, 400)
    return [torch.randint(1, 100, (num,)) for num in lengths.tolist()]


def pad(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads to the longest: ids of shape (N, T), and targets of shape (N,)."""
    return pad_sequence([*sequences], batch_first=True), torch.tensor(
        [len(one) % 3 for one in sequences]
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def by_hand(data: list[Tensor]) -> Callable[[int], None]:
    """Returns what trains for an epoch, and pads each microbatch by itself."""
    model = Encoder()
    optimizer = optimizer_of(model)
    loader: Any = DataLoader(data, BATCH_SIZE, shuffle=True, collate_fn=list)  # type: ignore[arg-type]

    def train(_: int) -> None:
        for batch in loader:
            for start in range(0, len(batch), SIZE):
                ids, targets = pad(batch[start : start + SIZE])
                loss = cross_entropy(model(ids), targets)
                (loss * (len(ids) / len(batch))).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def fitted(data: list[Tensor], collate_fn: Any, **settings: Any) -> Callable[[int], None]:
    """Returns what has a trainer train for an epoch."""
    task = Task(
        model=Encoder,
        loss=cross_entropy,
        train_dataloader=DataLoader(data, BATCH_SIZE, shuffle=True, collate_fn=collate_fn),  # type: ignore[arg-type]
        optimizer=optimizer_of,
    )
    trainer = Trainer(task, max_duration="1000ep", autoload=False, **settings)
    return lambda epoch: trainer.fit(until=f"{epoch + 1}ep")


def measure(num_epochs: int) -> dict[str, float]:
    """Lets the loops take turns; returns the time by hand in ms a step, and the others relative to it."""
    data = samples()
    loops = {
        "hand": by_hand(data),
        "collated": fitted(data, collated(pad, microbatch_size=SIZE)),
        "sliced": fitted(data, pad, microbatch_size=SIZE),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for epoch in range(num_epochs + 1):
        for name, train in loops.items():
            begin = time.process_time()
            train(epoch)
            times[name].append(time.process_time() - begin)
    hand = times.pop("hand")[1:]  # the first epoch imports what is left
    ratios = {
        name: statistics.median(a / b for a, b in zip(found[1:], hand, strict=True))
        for name, found in times.items()
    }
    return {"hand_ms": statistics.median(hand) / NUM_BATCHES * 1e3, **ratios}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = measure(args.epochs)
    if args.json:
        print(json.dumps(found))
        return
    table = Table("by hand, ms a step", "collated", "sliced", title="log-normal lengths")
    table.add_row(f"{found['hand_ms']:.1f}", f"{found['collated']:.2f}", f"{found['sliced']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
