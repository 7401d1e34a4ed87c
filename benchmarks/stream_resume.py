"""Streams over a kill: how many samples a run loses and repeats that goes on in mid-epoch.

Each kind of train data is trained on for two epochs in one go, and again with a stop at each of ten points,
and a second one five batches later: what a checkpoint holds is loaded into a new process's objects, made
anew. The numbers of the samples of both are compared: which are missing, which came twice, and whether the
order is the same. Kinds whose library isn't installed are left out, and named.

    python benchmarks/stream_resume.py [--framework eventloop|lightning|transformers] [--points 10]
        [--ranks 2] [--kind PART_OF_NAME] [--json]

Lightning and transformers, where they are installed, get the same data loaders, and save after each batch. Ranks
are eventloop's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from stream_kinds import BATCH_SIZE, KINDS, NUM, Make


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
    """Returns the numbers of a batch's samples, shape (N,)."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()))
    return torch.as_tensor(batch).flatten()


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


def by_transformers(folder: Path, make: Make, stop: int | None, num_epochs: int) -> list[int]:
    """The same by the Trainer of transformers, which saves after each batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    seen: list[int] = []
    length = len(list(itertools.islice(make(), 1_000)))

    class Model(Net):
        def forward(self, number: Any = None, **_: Any) -> Any:
            seen.extend(numbers_of(number).tolist())
            return {"loss": super().forward(number)}

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                raise Stopped

    class Own(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            made = make()
            return self.accelerator.prepare(made) if isinstance(made, DataLoader) else made

        def get_batch_samples(self, iterator: Any, num: int, device: Any) -> Any:
            taken = itertools.islice(iterator, num)
            return [{"number": numbers_of(one)} for one in taken], None

    args = transformers.TrainingArguments(
        str(folder), max_steps=length * num_epochs, save_strategy="no", report_to=[], seed=0,
        disable_tqdm=True, use_cpu=True, learning_rate=1e-9, save_total_limit=1,
        remove_unused_columns=False, logging_strategy="no", per_device_train_batch_size=BATCH_SIZE,
    )  # fmt: skip
    # It asks for a data set, of which it takes nothing here.
    trainer = Own(Model(), args, train_dataset=[0], callbacks=[Stops()])
    saved = list(folder.glob("checkpoint-*"))
    with contextlib.suppress(Stopped):
        trainer.train(resume_from_checkpoint=str(saved[0]) if saved else None)
    return seen


FRAMEWORKS = {
    "eventloop": by_eventloop,
    "lightning": by_lightning,
    "transformers": by_transformers,
}


def on_ranks(num_ranks: int) -> Callable[..., list[int]]:
    """Returns `by_eventloop` on several ranks; the samples of one after those of the other."""
    from eventloop_testing import run_ranks

    def fit(*args: Any) -> list[int]:
        return [
            one for seen in run_ranks(by_eventloop, *args, world_size=num_ranks) for one in seen
        ]

    return fit


def _said(warning: warnings.WarningMessage) -> str:
    return str(warning.message).partition("\n")[0]


def _joined(parts: list[list[int]], num_ranks: int) -> list[int]:
    """Returns the samples of each rank, over all parts of a run, one rank after the other."""
    sizes = [len(part) // num_ranks for part in parts]
    return [
        one
        for rank in range(num_ranks)
        for part, size in zip(parts, sizes, strict=True)
        for one in part[rank * size : (rank + 1) * size]
    ]


def resumed(
    fit: Callable[..., list[int]], make: Make, points: int, num_ranks: int = 1
) -> dict[str, Any]:
    """Returns what runs lose and repeat that were stopped at as many points, twice, and went on."""
    folder = Path(tempfile.mkdtemp())
    words: set[str] = set()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11
            whole = fit(folder / "whole", make, None, 2)
            words |= {_said(one) for one in caught if one.category is UserWarning}
            num = len(whole) // num_ranks // BATCH_SIZE
            lost, repeated, others = 0, 0, 0
            for idx in range(points):
                own = folder / str(idx)
                stop = max(1, (idx + 1) * num // (points + 1))
                stops = [*(one for one in (stop, stop + 5) if one < num), None]
                parts = [fit(own, make, one, 2) for one in stops]
                found = _joined(parts, num_ranks)
                lost += sum((Counter(whole) - Counter(found)).values())
                repeated += sum((Counter(found) - Counter(whole)).values())
                others += found != whole
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
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kind", action="append", help="a part of a kind's name; may be repeated")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = {}
    for name, kind in KINDS.items():
        if given.kind and not any(part in name for part in given.kind):
            continue
        missing = [one for one in kind.needs if importlib.util.find_spec(one) is None]
        fit = FRAMEWORKS[given.framework] if given.ranks == 1 else on_ranks(given.ranks)
        rows[name] = (
            {"not installed": missing}
            if missing
            else resumed(fit, kind.make, given.points, given.ranks)
        )
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(
        title=f"{given.framework}: {given.points} times two stops of two epochs of {NUM} samples"
    )
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
