"""Streams over a kill: how many samples a run loses and repeats that goes on in mid-epoch.

Each kind of train data is trained on for two epochs in one go, and again with a stop at each of ten points:
what a checkpoint holds is loaded into a new process's objects, made anew. The numbers of the samples
of both are compared: which are missing, which came twice, and whether the order is the same. Kinds whose
library isn't installed are left out, and named.

    python benchmarks/stream_resume.py [--framework eventloop|lightning] [--points 10] [--json]

Lightning, where it is installed, gets the same data loaders, and its own checkpoints in mid-epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
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
}


class Net(nn.Module):
    """A model that doesn't look at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        return self.weight * numbers_of(batch).float().mean()


class Stopped(BaseException):
    """The run ends here, as if it were killed."""


def numbers_of(batch: Any) -> Tensor:
    return batch["number"] if isinstance(batch, Mapping) else batch


def by_eventloop(folder: Path, make: Make, stop: int | None, num_epochs: int) -> list[int]:
    """Trains, or goes on; returns the numbers of the samples of this process."""
    from eventloop import Task, hookimpl
    from eventloop_testing import isolated_trainer

    seen: list[int] = []

    class Sees:
        name = "sees"

        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            seen.extend(numbers_of(state.batch).tolist())

        @hookimpl
        def batch_start(self, state: Any) -> None:
            if state.clock.batch == stop:  # the batch before is in the checkpoint
                raise Stopped

    task = Task(
        model=Net,
        train_dataloader=make,
        forward=lambda model, batch: {"loss": model(batch)},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
    )
    given = {"max_duration": f"{num_epochs}ep", "checkpoint_interval": "1ba"}
    try:
        with isolated_trainer(folder, task, callbacks=[Sees()], **given) as trainer:
            trainer.fit()
    except Stopped:
        pass
    return seen


def by_lightning(folder: Path, make: Make, stop: int | None, num_epochs: int) -> list[int]:
    """The same by Lightning's Trainer, which saves after each batch."""
    import lightning

    lightning.seed_everything(0, verbose=False)
    seen: list[int] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any) -> Tensor:
            seen.extend(numbers_of(batch).tolist())
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(folder / "last.ckpt")
            if trainer.global_step == stop:
                raise Stopped

    folder.mkdir(parents=True, exist_ok=True)
    trainer = lightning.Trainer(
        max_epochs=num_epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Saves()],
        default_root_dir=folder,
    )  # fmt: skip
    saved = folder / "last.ckpt"
    with contextlib.suppress(Stopped):
        trainer.fit(Module(), make(), ckpt_path=saved if saved.exists() else None)
    return seen


FRAMEWORKS = {"eventloop": by_eventloop, "lightning": by_lightning}


def resumed(fit: Callable[..., list[int]], make: Make, points: int) -> dict[str, Any]:
    """Returns what runs lose and repeat that were stopped at as many points, and went on."""
    folder = Path(tempfile.mkdtemp())
    words: set[str] = set()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11
            whole = fit(folder / "whole", make, None, 2)
            num = len(whole) // BATCH_SIZE
            lost, repeated, others = 0, 0, 0
            for idx in range(points):
                own = folder / str(idx)
                stop = max(1, (idx + 1) * num // (points + 1))
                first = fit(own, make, stop, 2)
                second = fit(own, make, None, 2)
                lost += sum((Counter(whole) - Counter(first + second)).values())
                repeated += sum((Counter(first + second) - Counter(whole)).values())
                others += first + second != whole
        words |= {
            str(one.message).partition("\n")[0] for one in caught if one.category is UserWarning
        }
        return {
            "lost": lost,
            "repeated": repeated,
            "other order": others,
            "warnings": sorted(words),
        }
    except Exception as error:  # noqa: BLE001  whatever a library refuses is a row of the table
        return {"refused": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="eventloop")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--kind", action="append", help="a part of a kind's name; may be repeated")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = {}
    for name, kind in KINDS.items():
        if given.kind and not any(part in name for part in given.kind):
            continue
        missing = [one for one in kind.needs if importlib.util.find_spec(one) is None]
        fit = FRAMEWORKS[given.framework]
        rows[name] = (
            {"not installed": missing} if missing else resumed(fit, kind.make, given.points)
        )
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"{given.framework}: {given.points} stops of two epochs of {NUM} samples")
    for column in ("train data", "lost", "repeated", "in another order", "said"):
        table.add_column(column)
    for name, row in rows.items():
        said = "; ".join(row.get("warnings", ())) or row.get("refused", "")
        said = (
            f"not installed: {', '.join(row['not installed'])}" if "not installed" in row else said
        )
        numbers = [str(row.get(one, "")) for one in ("lost", "repeated", "other order")]
        table.add_row(name, *numbers, said[:160])
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
