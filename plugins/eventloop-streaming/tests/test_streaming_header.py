"""What the header says of streams that would lose samples over a stop."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from eventloop_streaming.plugin import Streaming


class _Datasets:
    """Stands in for the module: streams whose parts have its names."""

    class IterableDataset:
        def __init__(self, part):
            self._ex_iterable = part


class BufferShuffledExamplesIterable:
    def __init__(self, buffer_size, inner=None):
        self.buffer_size, self.ex_iterable = buffer_size, inner


class Wrapped:
    def __init__(self, *parts):
        self.ex_iterables = list(parts)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (BufferShuffledExamplesIterable(1000), "loses and repeats up to 1,000;"),
        (Wrapped(BufferShuffledExamplesIterable(10, Wrapped()), BufferShuffledExamplesIterable(5)),
         "a buffer of 10 samples that isn't saved: a run that goes on in mid-epoch loses and repeats up to 15;"),
        (Wrapped(), ""),
    ],
)  # fmt: skip
def test_the_header_says_what_a_stream_of_datasets_would_lose(part, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)

    note = noted(_Datasets.IterableDataset(part))

    assert words in note
    assert bool(words) == bool(note)


def noted(loader, num_ranks=1):
    """Returns what the header says of a data loader."""
    plugin = Streaming()
    plugin.init(SimpleNamespace(train_dataloader=loader, data_world_size=num_ranks))
    return plugin.note


def with_workers(dataset, num_workers):
    return SimpleNamespace(dataset=dataset, num_workers=num_workers)


def test_each_worker_of_each_rank_has_a_buffer(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)
    data = _Datasets.IterableDataset(BufferShuffledExamplesIterable(10))

    assert "loses and repeats up to 40, or ends in an error of `datasets`;" in noted(
        with_workers(data, 2), num_ranks=2
    )


@pytest.mark.parametrize(("num_workers", "is_noted"), [(0, False), (1, False), (2, True)])
def test_the_header_names_workers_of_a_stream_of_datasets(num_workers, is_noted, monkeypatch):
    """One that was loaded has no state until it yields; a single one does before the next save."""
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)
    data = _Datasets.IterableDataset(Wrapped())

    assert ("StreamState" in noted(with_workers(data, num_workers))) == is_noted


class _Webdataset:
    """Stands in for the module: a pipeline whose stages have its names."""

    class DataPipeline:
        def __init__(self, *stages):
            self.pipeline = [object(), *stages]


class Stage:
    def __init__(self, function, *args, **kw):
        self.f, self.args, self.kw = function, args, kw


def _shuffle():
    pass


def tar_file_expander():
    pass


OPEN = Stage(tar_file_expander)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((OPEN, Stage(_shuffle, 50)), "loses and repeats up to 50;"),
        ((OPEN, Stage(_shuffle)), "loses and repeats up to 1,000;"),
        ((Stage(_shuffle, 8), OPEN, Stage(_shuffle, 50)), "as many as the epoch has had;"),
        ((Stage(_shuffle, 8, seed=0), OPEN, Stage(_shuffle, 50, seed=0)), ""),
        ((OPEN,), ""),
    ],
)
def test_the_header_names_a_shuffle_without_a_seed(stages, words, monkeypatch):
    """Read again, its samples come in another order, each about as far from its place as the buffer is large."""
    monkeypatch.setitem(sys.modules, "webdataset", _Webdataset)

    note = noted(_Webdataset.DataPipeline(*stages))

    assert words in note
    assert bool(words) == bool(note)


class _Litdata:
    """Stands in for the module."""

    class StreamingDataset:
        pass

    class StreamingDataLoader:
        def __init__(self, dataset, num_workers=2):
            self.dataset, self.num_workers, self.batch_size = dataset, num_workers, 4
            self.generator = None

        def __len__(self):
            return 300


@pytest.mark.parametrize(
    ("dataset", "num_workers", "words"),
    [
        (_Litdata.StreamingDataset(), 1, "up to all 1,200 samples"),
        (object(), 2, "up to all samples"),
        (_Litdata.StreamingDataset(), 0, "no sample is lost or repeated, but dropout draws other"),
    ],
)
def test_the_header_names_a_loader_of_litdata(dataset, num_workers, words, monkeypatch):
    """Gone on with, with workers it forgets its epoch."""
    monkeypatch.setitem(sys.modules, "litdata", _Litdata)

    assert words in noted(_Litdata.StreamingDataLoader(dataset, num_workers))


class _Mosaicml:
    """Stands in for the module."""

    class StreamingDataLoader:
        def __init__(self, generator):
            self.generator = generator


@pytest.mark.parametrize(("generator", "is_noted"), [(None, True), (object(), False)])
def test_the_header_names_a_loader_that_draws_when_it_goes_on(generator, is_noted, monkeypatch):
    """Its batches are the same, but those of dropout aren't."""
    monkeypatch.setitem(sys.modules, "streaming", _Mosaicml)

    assert ("torch.Generator()" in noted(_Mosaicml.StreamingDataLoader(generator))) == is_noted
