"""A storage that is made of `eventloop.storage` alone, without eventloop-remote."""

from __future__ import annotations

import pytest
import torch

from eventloop.storage import Store

SHELF = """
from dataclasses import replace
from pathlib import Path

from eventloop.storage import Store


class Shelf:
    def __init__(self, folder, copies):
        self.folder = folder
        self._store = Store(Path("shelf", folder.path))

    def url_of(self, path):
        return self.folder / path.name

    def save(self, *given, **named):
        return self.url_of(self._store.save(*given, **named))

    def found(self, **named):
        return [replace(one, path=self.url_of(one.path)) for one in self._store.found(**named)]

    def latest(self, **named):
        path, refused = self._store.latest()
        return path and self.url_of(path), [(self.url_of(one), why) for one, why in refused]

    def newest_after(self, batch):
        return self._store.newest_after(batch)

    def prune(self, keep, safe=None):
        return [self.url_of(one) for one in self._store.prune(keep)]

    def clear(self, *, alone=False):
        self._store.clear(alone=alone)

    def has(self, name):
        return (self._store.folder / name).exists()

    def download(self, url):
        return self._store.folder / url.name


checkpoints = Shelf


def lock(run, local):
    return local
"""


@pytest.fixture
def fit(install, clean, make_trainer):
    """Trains at a URL of the shelf, or in a folder; returns notes and weights."""
    install("shelf", SHELF, target="", group="eventloop.storage", distribution="eventloop-shelf")

    def fit(run_dir, until=None):
        given = {"checkpoint_interval": "1ba", "max_duration": "2ep"}
        with make_trainer(run_dir=run_dir, **given) as trainer:
            trainer.fit(until)
        return trainer.notes, trainer.state.model.weight.detach().clone()

    return fit


def test_a_run_goes_on_from_a_shelf(fit, clean):
    """What saves, finds and removes whole checkpoints is a storage; which is the newest, it says itself."""
    _, expected = fit(clean / "here")

    fit("shelf://box/run", "4ba")
    notes, actual = fit("shelf://box/run")

    assert notes[0].startswith("resumed: shelf://box/run/checkpoints/ba00000004")
    assert torch.equal(actual, expected)
    (found,) = clean.glob("shelf/**/checkpoints")
    assert [one.batch for one in Store(found).found(digests=True)][:1] == [6]
