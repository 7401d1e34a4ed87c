"""Kinds of train data, each as its library's documentation has it, for `stream_resume.py`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import io
import multiprocessing
import os
import shutil
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
    """How a rank makes its part of the train data, and what has to be installed."""

    make: Make
    needs: tuple[str, ...] = ()


def rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Numbers(IterableDataset[int]):
    """The numbers of the samples, one after the other; ranks and workers share them."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        idx, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rank, world_size = rank_and_size()
        return iter(range(rank * num_workers + idx, NUM, world_size * num_workers))


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
    import datasets.distributed

    found = datasets.Dataset.from_dict({"number": list(range(NUM))})
    if not streamed:  # the trainer shares it out
        return change(found)
    stream = found.to_iterable_dataset(num_shards=8)
    return change(datasets.distributed.split_dataset_by_node(stream, *rank_and_size()))


def shuffled_stream() -> Any:
    return of_datasets(lambda data: data.shuffle(seed=0, buffer_size=BUFFER))


def plain_stream() -> Any:
    return of_datasets(lambda data: data)


def mapped_in_batches() -> Any:
    return of_datasets(lambda data: data.map(lambda rows: rows, batched=True, batch_size=5))


def interleaved() -> Any:
    import datasets

    return datasets.interleave_datasets(
        [plain_stream(), plain_stream()],
        probabilities=[0.7, 0.3],
        seed=0,
        stopping_strategy="first_exhausted",
    )


def own_shuffled(data: Make) -> Any:
    from eventloop_streaming import Shuffled

    return Shuffled(data(), BUFFER)


def kept(data: Make) -> Any:
    from eventloop_streaming import StreamState

    return StreamState(data())


def own_mixed() -> Any:
    from eventloop_streaming import Mixed, Shards, Sliced

    shards = Shards(range(8), lambda shard: range(12 * shard, 12 * shard + 12))
    parts = {"shards": shards, "list": Sliced(range(500, 540))}
    return Mixed(parts, {"shards": 0.7, "list": 0.3}, stop="all")


def own_batches(data: Make) -> Any:
    from eventloop_streaming import Batches

    return Batches(data(), BATCH_SIZE)


def generator() -> Iterator[Any]:
    """Yields batches once."""
    rank, world_size = rank_and_size()
    yield from torch.arange(rank, NUM, world_size).split(BATCH_SIZE)


class Lists:
    """Batches that are shuffled otherwise in each epoch, which it counts."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(NUM, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        rank, world_size = rank_and_size()
        return iter(order[rank::world_size].split(BATCH_SIZE))


def folder(function: Callable[[Path], None]) -> Callable[[], Path]:
    """Writes the files of a library once, in a process of its own.

    litdata's would leave "spawn" as the start method, and so for the workers of every other kind.
    """

    def write(path: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            function(path)

    @functools.cache
    def made() -> Path:
        path = Path(tempfile.mkdtemp(prefix="stream_resume_"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        process = multiprocessing.get_context("fork").Process(target=write, args=(path,))
        process.start()
        process.join()
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
    split = webdataset.split_by_node
    data = webdataset.WebDataset(urls, shardshuffle=8, seed=0, nodesplitter=split)
    shuffled = data.shuffle(buffer, seed=seed) if buffer else data
    return DataLoader(shuffled.decode().map(webdataset_number), BATCH_SIZE, num_workers=num_workers)


def webdataset_number(sample: dict[str, Any]) -> int:
    return int(sample["number.txt"])


def of_grain(num_workers: int = 0, *, is_kept: bool = True) -> Any:
    import grain

    from eventloop_streaming import IteratorState

    rank, world_size = rank_and_size()
    data = grain.MapDataset.source(list(range(NUM))).shuffle(seed=0)[rank::world_size]
    batches = data.batch(BATCH_SIZE).to_iter_dataset()
    if num_workers:
        options = grain.multiprocessing.MultiprocessingOptions(num_workers)
        batches = batches.mp_prefetch(options)
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


def of_litdata(num_workers: int = 0, *, is_kept: bool = False) -> Any:
    import litdata

    from eventloop_streaming import LitdataState

    data = litdata.StreamingDataset(str(lit_files() / "data"), shuffle=True, seed=0)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=num_workers)
    return LitdataState(loader) if is_kept else loader


def without_torchvision() -> None:
    """Lets mosaicml-streaming be imported without torchvision, whose data sets it has classes for."""
    if importlib.util.find_spec("torchvision") is None:
        with contextlib.suppress(ImportError):
            # They would take what follows for torchvision.
            import torchmetrics  # noqa: F401
            import transformers  # noqa: F401
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
    without_torchvision()
    import streaming

    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if rank_and_size() == (0, 1):
        streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(
        local=str(mds_files() / "data"), shuffle=True, shuffle_seed=0, batch_size=BATCH_SIZE
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


FILES = {"webdataset": tar_files, "litdata": lit_files, "streaming": mds_files}


def prepare(kind: Kind) -> list[str]:
    """Imports what a kind needs, and writes its files, so that forks share both.

    Returns:
        The modules that aren't installed.
    """
    missing = [one for one in kind.needs if importlib.util.find_spec(one) is None]
    for one in kind.needs if not missing else ():
        if one == "streaming":
            without_torchvision()
        importlib.import_module(one)
        if one in FILES:
            FILES[one]()
    return missing


def with_workers(name: str, make: Callable[[int], Any], *needs: str) -> dict[str, Kind]:
    """Returns a kind without workers and with two."""
    return {
        name: Kind(functools.partial(make, 0), needs),
        f"{name}, 2 workers": Kind(functools.partial(make, 2), needs),
    }


def torchdata_kind(name: str, data: Make, *needs: str) -> dict[str, Kind]:
    return with_workers(name, functools.partial(of_torchdata, data), "torchdata", *needs)


_OWN = "eventloop_streaming"
KINDS: dict[str, Kind] = {
    **with_workers(
        "list, DataLoader",
        lambda num: DataLoader(list(range(NUM)), BATCH_SIZE, shuffle=True, num_workers=num),
    ),
    **with_workers(
        "IterableDataset, DataLoader",
        lambda num: DataLoader(Numbers(), BATCH_SIZE, num_workers=num),
    ),
    **torchdata_kind("with a state, StatefulDataLoader", Counted),
    **with_workers(
        "datasets, map-style",
        lambda num: DataLoader(
            of_datasets(lambda one: one, streamed=False), BATCH_SIZE, shuffle=True, num_workers=num
        ),
        "datasets",
    ),
    **torchdata_kind("datasets, stream", plain_stream, "datasets"),
    **torchdata_kind("StreamState(datasets stream)", lambda: kept(plain_stream), "datasets", _OWN),
    **torchdata_kind("datasets, map and batches", mapped_in_batches, "datasets"),
    **torchdata_kind("datasets, interleaved", interleaved, "datasets"),
    **torchdata_kind("datasets, shuffle buffer", shuffled_stream, "datasets"),
    **torchdata_kind(
        "Shuffled(datasets stream)", lambda: own_shuffled(plain_stream), "datasets", _OWN
    ),
    **torchdata_kind("Shuffled(Mixed)", lambda: own_shuffled(own_mixed), _OWN),
    "Shuffled(Mixed), Batches": Kind(lambda: own_batches(lambda: own_shuffled(own_mixed)), (_OWN,)),
    "generator": Kind(generator),
    "an iterable that counts epochs": Kind(Lists),
    **with_workers("webdataset, shards", lambda num: of_webdataset(num, buffer=0), "webdataset"),
    **with_workers("webdataset, shuffle buffer", of_webdataset, "webdataset"),
    **with_workers("webdataset, with a seed", lambda num: of_webdataset(num, seed=0), "webdataset"),
    "grain": Kind(lambda: of_grain(is_kept=False), ("grain", _OWN)),
    **with_workers("IteratorState(grain)", of_grain, "grain", _OWN),
    **with_workers("litdata", of_litdata, "litdata"),
    **with_workers(
        "LitdataState(litdata)", lambda num: of_litdata(num, is_kept=True), "litdata", _OWN
    ),
    **with_workers("mosaicml-streaming", of_mosaicml, "streaming"),
    "Ray Data": Kind(RayBatches, ("ray",)),
    "ThreadedDataLoader": Kind(own_threads, (_OWN,)),
}
