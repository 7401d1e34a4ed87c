"""Trainings with packs: the same batches after kills, in microbatches, on ranks."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from eventloop import Task, hookimpl
from eventloop.data import Microbatches, collated
from eventloop_llm.packing import PackBatch, PackedDataset, PackedStream
from eventloop_testing import Dies, KilledRuns, isolated_trainer, run_ranks

MAX_TOKENS = 24
DOCUMENTS = [
    torch.full((1 + (num * 7) % 17,), 1 + num % 30, dtype=torch.int64) for num in range(90)
]


class Reads(nn.Module):
    """Predicts each token from itself and its position."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(32, 8), nn.Embedding(MAX_TOKENS, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids, position_ids, labels):
        logits = self.head(self.words(input_ids) + self.places(position_ids))
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class OwnPosition:
    """Documents that draw an order each epoch, and know where they are."""

    def __init__(self):
        self.epoch, self.num = 0, 0
        self.is_loaded = False

    def __iter__(self):
        if not self.is_loaded:
            self.epoch, self.num = self.epoch + 1, 0
        self.is_loaded = False
        order = torch.randperm(90, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for idx in order[self.num :]:
            self.num += 1
            yield DOCUMENTS[idx]

    def state_dict(self):
        return {"epoch": self.epoch, "num": self.num}

    def load_state_dict(self, state):
        self.epoch, self.num, self.is_loaded = state["epoch"], state["num"], True


def map_style():
    packs = PackedDataset(DOCUMENTS, MAX_TOKENS)
    return DataLoader(packs, 3, shuffle=True, collate_fn=PackBatch(length=MAX_TOKENS))


def microbatches():
    packs = PackedDataset(DOCUMENTS, MAX_TOKENS)
    collate_fn = collated(PackBatch(), microbatch_size=1)
    return DataLoader(packs, 3, shuffle=True, num_workers=2, collate_fn=collate_fn)


def stream():
    return PackedStream(DOCUMENTS, MAX_TOKENS, batch_size=3, num_open=4)


def stateful():
    return PackedStream(OwnPosition(), MAX_TOKENS, batch_size=2, num_open=4)


LOADERS = {one.__name__: one for one in (map_style, microbatches, stream, stateful)}


class Sees:
    """Keeps the tokens of each batch."""

    name = "sees"

    def __init__(self):
        self.batches = []

    @hookimpl
    def batch_start(self, state):
        parts = [*state.batch] if isinstance(state.batch, Microbatches) else [state.batch]
        self.batches.append([part["input_ids"].tolist() for part in parts])


def fit(folder, batch, kind, **given):
    """Trains two epochs; returns the batches."""
    task = Task(
        model=Reads,
        train_dataloader=LOADERS[kind],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        num_tokens=lambda batch: int((batch["labels"] != -100).sum()),
    )
    sees = Sees()
    settings = {"max_duration": "2ep", "checkpoint_interval": "1ba", "callbacks": [sees]} | given
    with isolated_trainer(folder, task, algorithms=[Dies(batch)], **settings) as trainer:
        trainer.fit()
    return sees.batches


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a kind, one of them in one go; made once."""
    made = {}

    def runs(kind):
        if kind not in made:
            made[kind] = KilledRuns(fit, tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return runs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_killed_run_ends_with_the_bits_of_one_in_one_go(tmp_path, runs, kind):
    """In the middle of an epoch, at its end, in the next one: open packs are in the checkpoint."""
    num = fit(tmp_path / "counted", None, kind)
    ends = [len(num) // 2 + one for one in (-2, 0, 3)]

    assert runs(kind).differing(tmp_path, 7, *ends) == []


def test_what_is_open_is_needed(tmp_path, runs):
    """Control: without it a resumed stream loses documents."""

    def forget(parts):
        found = [one for one in _mappings(parts) if "open" in one and "closed" in one]
        assert found
        for one in found:
            one["open"] = []

    assert runs("stream").differing(tmp_path, 8, forget=forget) != []


def _mappings(nest):
    if isinstance(nest, dict):
        yield nest
        for one in nest.values():
            yield from _mappings(one)
    elif isinstance(nest, list | tuple):
        for one in nest:
            yield from _mappings(one)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_has_each_document_once(tmp_path, kind):
    """In both epochs, whole."""
    batches = fit(tmp_path, None, kind)

    seen = [one for batch in batches for rows in batch for row in rows for one in row if one]
    assert sorted(seen) == sorted(torch.cat(DOCUMENTS * 2).tolist())


def test_ranks_share_the_packs(tmp_path):
    """As the samples of any data set with a length."""
    ranks = run_ranks(fit, tmp_path, None, "map_style", max_duration="1ep", uneven="pad")

    seen = [
        one
        for batches in ranks
        for batch in batches
        for rows in batch
        for row in rows
        for one in row
        if one
    ]
    assert Counter(seen) >= Counter(torch.cat(DOCUMENTS).tolist())
    assert len(seen) < 1.2 * len(torch.cat(DOCUMENTS))
    assert ranks[0] != ranks[1]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is not an int of 1 or more"),
        ({"batch_size": 2.0}, "batch_size=2.0 is not an int of 1 or more"),
        ({"num_open": True}, "num_open=True is not an int of 1 or more"),
    ],
)
def test_arguments_without_a_meaning_are_refused(given, shown):
    """Before there is a batch."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        PackedStream(DOCUMENTS, **{"max_tokens": 24} | given)


def test_a_document_that_fits_no_pack_is_named():
    """When it comes: a stream isn't known beforehand."""
    loader = iter(PackedStream([[1], [2], [3] * 9], 8))

    with pytest.raises(ValueError, match="document 2 of the stream has 9 tokens, and a pack takes"):
        [*loader]
