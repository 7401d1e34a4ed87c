"""What the header says of streams that would lose samples over a stop."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from eventloop import TaskError
from eventloop_streaming import Batches, Mixed, Shuffled
from eventloop_streaming.plugin import Streaming


class _Datasets:
    """Stands in for the module: streams whose parts have its names."""

    __version__ = "5.2.0"

    class IterableDataset:
        def __init__(self, part, num_shards=8):
            self._ex_iterable, self.num_shards = part, num_shards

        def __iter__(self):
            return iter(())


class BufferShuffledExamplesIterable:
    def __init__(self, buffer_size, inner=None):
        self.buffer_size, self.ex_iterable = buffer_size, inner


class InterleavedShardsExamplesIterable:
    def __init__(self, num_shards=8, max_input_shards=10):
        self.num_shards, self.max_input_shards = num_shards, max_input_shards


class Wrapped:
    def __init__(self, *parts):
        self.ex_iterables = list(parts)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (BufferShuffledExamplesIterable(1000), "loses and repeats up to 1,000;"),
        (Wrapped(BufferShuffledExamplesIterable(10, Wrapped()), BufferShuffledExamplesIterable(5)),
         "a buffer of 10 samples that isn't saved: a run that goes on in mid-epoch loses and repeats up to 15;"),
        (BufferShuffledExamplesIterable(1), ""),
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
    return plugin.header_note()


def with_workers(dataset, num_workers):
    return SimpleNamespace(dataset=dataset, num_workers=num_workers)


def test_a_stream_in_a_mixture_is_found(monkeypatch):
    """Streams of this package don't hide what they are made of."""
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)
    data = _Datasets.IterableDataset(BufferShuffledExamplesIterable(10))

    assert "up to 10;" in noted(Batches(Mixed({"own": [1], "theirs": data}), 4))


def test_each_worker_of_each_rank_has_a_buffer(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)
    data = _Datasets.IterableDataset(BufferShuffledExamplesIterable(10))

    assert "loses and repeats up to 40;" in noted(with_workers(data, 2), num_ranks=2)


def interleaved(num_shards, max_input_shards, num_workers):
    """Returns a loader over a stream that is shuffled from several shards at once."""
    part = InterleavedShardsExamplesIterable(num_shards, max_input_shards)
    data = _Datasets.IterableDataset(BufferShuffledExamplesIterable(1, part), num_shards)
    return with_workers(Shuffled(data, 16), num_workers)


@pytest.mark.parametrize(
    ("loader", "is_refused"),
    [
        ((8, 10, 2), True),
        ((3, 10, 2), True),
        ((15, 4, 4), True),
        ((20, 10, 2), False),
        ((1, 10, 2), False),
        ((8, 1, 2), False),
        ((8, 10, 0), False),
    ],
)
def test_workers_with_fewer_shards_than_are_read_at_once_are_refused_on_resume(
    loader, is_refused, monkeypatch
):
    """They end in an IndexError of `datasets`, within `Shuffled`, too; the header says so from the start."""
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)
    loader = interleaved(*loader)
    state = SimpleNamespace(train_dataloader=loader, clock=SimpleNamespace(batch_in_epoch=3))

    assert (
        "can't go on in mid-epoch, only from the end of an epoch" in noted(loader)
    ) == is_refused
    if is_refused:
        with pytest.raises(TaskError, match=r"at once \(max_buffer_input_shards\)") as caught:
            Streaming().after_load(state)
        assert "max_buffer_input_shards=1" in caught.value.fix
    else:
        Streaming().after_load(state)


@pytest.mark.parametrize(("version", "batch_in_epoch"), [("5.2.0", 0), ("5.3.0", 3)])
def test_the_end_of_an_epoch_and_other_versions_are_not_refused(
    version, batch_in_epoch, monkeypatch
):
    """There it goes on; what another version does isn't known."""
    monkeypatch.setitem(sys.modules, "datasets", _Datasets)
    monkeypatch.setattr(_Datasets, "__version__", version)
    clock = SimpleNamespace(batch_in_epoch=batch_in_epoch)

    Streaming().after_load(SimpleNamespace(train_dataloader=interleaved(8, 10, 2), clock=clock))


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

        def __len__(self):
            return 300


@pytest.mark.parametrize(
    ("dataset", "num_workers", "words"),
    [
        (_Litdata.StreamingDataset(), 1, "up to all 1,200 samples"),
        (object(), 2, "up to all samples"),
        (_Litdata.StreamingDataset(), 0, ""),
    ],
)
def test_the_header_names_a_loader_of_litdata(dataset, num_workers, words, monkeypatch):
    """Gone on with, with workers it forgets its epoch."""
    monkeypatch.setitem(sys.modules, "litdata", _Litdata)

    note = noted(_Litdata.StreamingDataLoader(dataset, num_workers))

    assert words in note
    assert bool(words) == bool(note)
