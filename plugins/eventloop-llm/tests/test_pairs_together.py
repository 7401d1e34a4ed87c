"""Each pair of packages does what the table of the README says."""

from __future__ import annotations

import itertools
from pathlib import Path

import post_training_pairs as pairs
import pytest
import torch

from eventloop import hookimpl

README = Path(__file__).parents[1] / "README.md"


def said():
    """The marks of the README's table, by pair."""
    lines = README.read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| | packing |"))
    columns = [one.strip() for one in lines[start].split("|")[2:-1]]
    found = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]):
        first, *marks = (one.strip(" *") for one in line.split("|")[1:-1])
        marked = zip(columns, marks, strict=True)
        found |= {(first, second): mark for second, mark in marked if mark}
    return found


SAID = said()


def test_the_table_has_all_pairs():
    """A package more is a row and a column more."""
    assert SAID.keys() == set(pairs.PAIRS)


@pytest.mark.sampled(64)
@pytest.mark.parametrize(("first", "second"), pairs.PAIRS, ids="-".join)
def test_a_pair_is_correct_or_refused_with_a_reason(first, second, monkeypatch):
    """Resumed twice, and beside what only watches as without it."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = pairs.verdict(first, second)

    assert found.mark == SAID[first, second].rstrip("¹²³⁴"), found
    assert bool(found.reason) == (found.mark == pairs.REFUSED)


class Forgets:
    """Makes each gradient larger by what it has seen, which it doesn't keep."""

    name = "forgets"

    def __init__(self):
        self.seen = 0

    @hookimpl
    def after_train_batch(self, state):
        self.seen += 1
        for one in state.model.parameters():
            one.grad *= self.seen


class Meddles:
    """Says that it only watches."""

    name = "meddles"

    @hookimpl
    def after_train_batch(self, state):
        for one in state.model.parameters():
            one.grad *= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("part", "shown"), [(Forgets, "resumed, weights differ"), (Meddles, "without other, weights")]
)
def test_what_is_not_correct_would_be_seen(part, shown, monkeypatch):
    """Control."""
    monkeypatch.setitem(pairs.PARTS, "other", part)
    monkeypatch.setattr(pairs, "WATCHERS", ("other",))
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)  # AdamW's steps don't grow

    assert shown in pairs.verdict("sft", "other").mark
