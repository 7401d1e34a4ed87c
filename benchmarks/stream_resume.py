"""Streams over a kill: how many samples a run loses and repeats that goes on in mid-epoch.

Each kind of train data is trained on for two epochs in one go, and again with a stop at each of ten points,
and a second one a batch later: what a checkpoint holds is loaded into a new process's objects, made
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
import gc
import itertools
import json
import multiprocessing
import re
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

from eventloop_testing import run_ranks
from eventloop_testing.ranks import RankError

sys.path.insert(0, str(Path(__file__).parent))
from stream_kinds import BATCH_SIZE, KINDS, NUM, Make, prepare


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
    from eventloop_streaming.plugin import Streaming
    from eventloop_testing import isolated_trainer

    seen: list[int] = []

    class Sees:
        name = "sees"

        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            seen.extend(numbers_of(state.batch).tolist())

        @hookimpl
        def should_checkpoint(self, state: Any) -> bool:
            return bool(state.clock.batch == stop)

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
    given = {"max_duration": f"{num_epochs}ep", "checkpoint_interval": f"{num_epochs}ep"}
    try:
        with isolated_trainer(folder, task, callbacks=[Sees(), Streaming()], **given) as trainer:
            trainer.fit()
    except Stopped:
        pass
    _end_workers()
    return seen


def _end_workers() -> None:
    """Ends the workers of loaders that have their iterator for as long as they live, such as torchdata's.

    Collected in a cycle, as one is with a trainer, an iterator waits five seconds for each worker: the queues
    by which it asks them to end are closed before it is.
    """
    if not multiprocessing.active_children():
        return  # to look at all objects takes longer than a small run
    for one in gc.get_objects():
        if end := getattr(type(one), "_shutdown_workers", None):
            end(one)


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


def _said(warning: warnings.WarningMessage) -> str:
    return str(warning.message).partition("\n")[0]


def resumed(
    fit: Callable[..., list[int]], make: Make, points: int, num_ranks: int = 1
) -> dict[str, Any]:
    """Returns what runs lose and repeat that were stopped at as many points, twice, and went on.

    On several ranks, by eventloop, each rank's samples are compared with its own; the sums are returned.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        if num_ranks == 1:
            return _compared(folder, fit, make, points)
        args = (_compared, folder, fit, make, points)
        rows = run_ranks(*args, world_size=num_ranks, timeout_s=1_200)
        sums = {
            name: sum(row[name] for row in rows) for name in ("lost", "repeated", "other order")
        }
        return {**sums, "warnings": sorted({one for row in rows for one in row["warnings"]})}
    except Exception as error:  # noqa: BLE001  whatever a library refuses is a row of the table
        text = f"{type(error).__name__}: {error}"
        # That of a rank ends with what was raised, and with notes on it.
        raised = re.findall(r"^[\w.]+: .*", text, re.MULTILINE)
        return {"refused": raised[-1 if isinstance(error, RankError) else 0]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compared(
    folder: Path, fit: Callable[..., list[int]], make: Make, points: int
) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11
        whole = fit(folder / "whole", make, None, 2)
        words = {_said(one) for one in caught if one.category is UserWarning}
        num = len(whole) // BATCH_SIZE
        lost, repeated, others = 0, 0, 0
        for idx in range(points):
            own = folder / str(idx)
            stop = max(1, (idx + 1) * num // (points + 1))
            stops = [*(one for one in (stop, stop + 1) if one < num), None]
            found = [one for stop in stops for one in fit(own, make, stop, 2)]
            lost += sum((Counter(whole) - Counter(found)).values())
            repeated += sum((Counter(found) - Counter(whole)).values())
            others += found != whole
    return {"lost": lost, "repeated": repeated, "other order": others, "warnings": sorted(words)}


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
        missing = prepare(kind)
        fit = FRAMEWORKS[given.framework]
        rows[name] = (
            {"not installed": missing}
            if missing
            else resumed(fit, kind.make, given.points, given.ranks)
        )
        print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
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
