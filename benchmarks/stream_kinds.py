"""Kinds of train data, each as its library's documentation has it, for `stream_resume.py`."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

NUM, BATCH_SIZE, BUFFER = 96, 4, 16
Make = Callable[[], Any]


class Kind(NamedTuple):
    """How the train data are made, and what has to be installed."""

    make: Make
    needs: tuple[str, ...] = ()


class Numbers(IterableDataset[int]):
    """The numbers of the samples, one after the other; workers share them."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(start, NUM, step))


class Counted(Numbers):
    """The same with a position."""

    def __init__(self) -> None:
        self.num, self.is_loaded = 0, False

    def __iter__(self) -> Iterator[int]:
        self.num, self.is_loaded = self.num if self.is_loaded else 0, False
        for one in list(super().__iter__())[self.num :]:
            self.num += 1
            yield one

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num, self.is_loaded = state["num"], True


def of_torchdata(data: Make, num_workers: int = 0) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data(), BATCH_SIZE, num_workers=num_workers)


def of_datasets(change: Callable[[Any], Any], *, streamed: bool = True) -> Any:
    import datasets

    found = datasets.Dataset.from_dict({"number": list(range(NUM))})
    return change(found.to_iterable_dataset(num_shards=8) if streamed else found)


def shuffled_stream() -> Any:
    return of_datasets(lambda data: data.shuffle(seed=0, buffer_size=BUFFER))


def interleaved() -> Any:
    import datasets

    return datasets.interleave_datasets(
        [of_datasets(lambda data: data), of_datasets(lambda data: data)],
        probabilities=[0.7, 0.3],
        seed=0,
        stopping_strategy="first_exhausted",
    )


def own_shuffled(data: Make) -> Any:
    from eventloop_streaming import Shuffled

    return Shuffled(data(), BUFFER)


def own_mixed() -> Any:
    from eventloop_streaming import Mixed, Shards

    shards = Shards(range(8), lambda shard: range(12 * shard, 12 * shard + 12))
    return Mixed(
        {"shards": shards, "list": range(500, 540)}, {"shards": 0.7, "list": 0.3}, stop="all"
    )


def own_batches(data: Make) -> Any:
    from eventloop_streaming import Batches

    return Batches(data(), BATCH_SIZE)


def generator() -> Iterator[Any]:
    """Yields batches once."""
    yield from torch.arange(NUM).split(BATCH_SIZE)


class Lists:
    """Batches that are shuffled otherwise in each epoch, which it counts."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(NUM, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return iter(order.split(BATCH_SIZE))


def folder(function: Callable[[Path], None]) -> Callable[[], Path]:
    """Writes the files of a library once a process."""

    @functools.cache
    def made() -> Path:
        path = Path(tempfile.mkdtemp(prefix="stream_resume_"))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            function(path)
        return path

    return made


@folder
def tar_files(path: Path) -> None:
    import webdataset

    for shard in range(8):
        with webdataset.TarWriter(str(path / f"{shard}.tar")) as writer:
            for idx in range(NUM // 8 * shard, NUM // 8 * (shard + 1)):
                writer.write({"__key__": f"{idx:04}", "number.txt": str(idx)})


def of_webdataset(num_workers: int = 0, buffer: int = BUFFER, seed: int | None = None) -> Any:
    import webdataset

    urls = [str(tar_files() / f"{shard}.tar") for shard in range(8)]
    data = webdataset.WebDataset(urls, shardshuffle=8, seed=0)
    shuffled = data.shuffle(buffer, seed=seed) if buffer else data
    return DataLoader(shuffled.decode().map(webdataset_number), BATCH_SIZE, num_workers=num_workers)


def webdataset_number(sample: dict[str, Any]) -> int:
    return int(sample["number.txt"])


def of_grain(*, is_kept: bool) -> Any:
    import grain

    from eventloop_streaming import IteratorState

    data = grain.MapDataset.source(list(range(NUM))).shuffle(seed=0).batch(BATCH_SIZE)
    batches = data.to_iter_dataset()
    return IteratorState(batches) if is_kept else batches


def same(number: int) -> int:
    return number


@folder
def lit_files(path: Path) -> None:
    import litdata

    litdata.optimize(
        fn=same, inputs=list(range(NUM)), output_dir=str(path / "data"), chunk_size=12,
        num_workers=1,
    )  # fmt: skip


def of_litdata(num_workers: int = 0) -> Any:
    import litdata

    data = litdata.StreamingDataset(str(lit_files() / "data"), shuffle=True, seed=0)
    return litdata.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=num_workers)


def without_torchvision() -> None:
    """Lets mosaicml-streaming be imported without torchvision, whose data sets it has classes for."""
    if importlib.util.find_spec("torchvision") is None:
        with contextlib.suppress(ImportError):
            import transformers  # noqa: F401  it would take what follows for torchvision
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            made: Any = types.ModuleType(f"torchvision{name}")
            made.__spec__, made.__path__ = importlib.machinery.ModuleSpec(made.__name__, None), []
            made.VisionDataset, made.to_tensor = object, None
            sys.modules[made.__name__] = made


@folder
def mds_files(path: Path) -> None:
    without_torchvision()
    import streaming

    with streaming.MDSWriter(
        out=str(path / "data"), columns={"number": "int"}, size_limit=200
    ) as writer:
        for idx in range(NUM):
            writer.write({"number": idx})


def of_mosaicml(num_workers: int = 0) -> Any:
    local = str(mds_files() / "data")
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(
        local=local, shuffle=True, shuffle_seed=0, batch_size=BATCH_SIZE
    )
    return streaming.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=num_workers)


class RayBatches:
    """Batches of Ray Data, as `ray.train` has them."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ray_data().iter_torch_batches(batch_size=BATCH_SIZE))


@functools.cache
def ray_data() -> Any:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.range(NUM).materialize()


def own_threads() -> Any:
    from eventloop_streaming import ThreadedDataLoader

    return ThreadedDataLoader(list(range(NUM)), BATCH_SIZE, shuffle=True, num_workers=2)


_TORCHDATA, _DATASETS, _OWN = ("torchdata",), ("datasets", "torchdata"), ("eventloop_streaming",)
KINDS: dict[str, Kind] = {
    "list, shuffled DataLoader": Kind(
        lambda: DataLoader(list(range(NUM)), BATCH_SIZE, shuffle=True)
    ),
    "list, 2 workers": Kind(
        lambda: DataLoader(list(range(NUM)), BATCH_SIZE, shuffle=True, num_workers=2)
    ),
    "IterableDataset, DataLoader": Kind(lambda: DataLoader(Numbers(), BATCH_SIZE)),
    "IterableDataset, 2 workers": Kind(lambda: DataLoader(Numbers(), BATCH_SIZE, num_workers=2)),
    "with a state, StatefulDataLoader": Kind(lambda: of_torchdata(Counted), _TORCHDATA),
    "with a state, 2 workers": Kind(lambda: of_torchdata(Counted, 2), _TORCHDATA),
    "datasets, map-style": Kind(
        lambda: DataLoader(of_datasets(lambda one: one, streamed=False), BATCH_SIZE, shuffle=True),
        ("datasets",),
    ),
    "datasets, stream": Kind(lambda: of_torchdata(lambda: of_datasets(lambda one: one)), _DATASETS),
    "datasets, stream, 2 workers": Kind(
        lambda: of_torchdata(lambda: of_datasets(lambda one: one), 2), _DATASETS
    ),
    "datasets, stream with map": Kind(
        lambda: of_torchdata(lambda: of_datasets(lambda one: one.map(lambda row: row))), _DATASETS
    ),
    "datasets, interleaved": Kind(lambda: of_torchdata(interleaved), _DATASETS),
    "datasets, shuffle buffer": Kind(lambda: of_torchdata(shuffled_stream), _DATASETS),
    "Shuffled(datasets stream)": Kind(
        lambda: of_torchdata(lambda: own_shuffled(lambda: of_datasets(lambda one: one))),
        (*_DATASETS, *_OWN),
    ),
    "Shuffled(Mixed), Batches": Kind(lambda: own_batches(lambda: own_shuffled(own_mixed)), _OWN),
    "Shuffled(Mixed), 2 workers": Kind(
        lambda: of_torchdata(lambda: own_shuffled(own_mixed), 2), (*_TORCHDATA, *_OWN)
    ),
    "generator": Kind(generator),
    "an iterable that counts epochs": Kind(Lists),
    "webdataset, shards": Kind(lambda: of_webdataset(buffer=0), ("webdataset",)),
    "webdataset, shuffle buffer": Kind(of_webdataset, ("webdataset",)),
    "webdataset, buffer with a seed": Kind(lambda: of_webdataset(seed=0), ("webdataset",)),
    "webdataset, the same, 2 workers": Kind(lambda: of_webdataset(2, seed=0), ("webdataset",)),
    "grain": Kind(lambda: of_grain(is_kept=False), ("grain", *_OWN)),
    "IteratorState(grain)": Kind(lambda: of_grain(is_kept=True), ("grain", *_OWN)),
    "litdata": Kind(of_litdata, ("litdata",)),
    "litdata, 2 workers": Kind(lambda: of_litdata(2), ("litdata",)),
    "mosaicml-streaming": Kind(of_mosaicml, ("streaming",)),
    "mosaicml-streaming, 2 workers": Kind(lambda: of_mosaicml(2), ("streaming",)),
    "Ray Data": Kind(RayBatches, ("ray",)),
    "ThreadedDataLoader": Kind(own_threads, _OWN),
}
