"""Host reads of other frameworks: how often their steps wait for the device, on the pretend accelerator.

    python benchmarks/host_reads_others.py [--json]

Each trains the same perceptron with SGD and clipping, as its documentation shows, and logs a loss every
hundred steps; counted is what a GPU's host would wait at (`item`, `bool`, `.cpu()`, a blocking copy of
something computed) between the begins of steps 2 and 3. Frameworks that aren't installed, or don't run
on this device, are rows with the reason. Three of them train on eventloop's loop, too, by the packages for it. eventloop's own
numbers are those of `host_reads.py`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eventloop import Task, Trainer, hookimpl
from eventloop_testing import counted_waits, pretend_device

STEPS, CLIP = 4, 1.0
Count = Callable[[], None]
DATA = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def plain(device: torch.device, begins: Count) -> None:
    net = model().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in DataLoader(DATA, 16):
        begins()
        loss = cross_entropy(net(inputs.to(device)), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def of_eventloop(device: torch.device, begins: Count) -> None:
    class Begins:
        @hookimpl
        def batch_start(self, state: Any) -> None:
            begins()

    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=DataLoader(DATA, 16),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    )
    given: Any = {"max_duration": f"{STEPS}ba", "clip_norm": CLIP, "log_interval": "100ba"}
    with Trainer(
        task, callbacks=[Begins()], device=str(device), autoload=False, run_dir=None, **given
    ) as trainer:
        trainer.fit()


def of_ignite(device: torch.device, begins: Count) -> None:
    from ignite.engine import Events, create_supervised_trainer

    net = model().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = create_supervised_trainer(net, optimizer, cross_entropy, device=device)
    engine.add_event_handler(Events.ITERATION_STARTED, lambda _: begins())
    engine.run(DataLoader(DATA, 16), max_epochs=1)


def of_lightning(device: torch.device, begins: Count, *, on_eventloop: bool = False) -> None:
    import lightning
    from lightning.pytorch.accelerators import CPUAccelerator

    class Pretend(CPUAccelerator):  # type: ignore[misc]
        def setup_device(self, device: Any) -> None: ...

        @staticmethod
        def get_parallel_devices(devices: Any) -> Any:
            return [device]

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_start(self, *_: Any) -> None:
            begins()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    kind: Any = lightning.Trainer
    given: Any = {}
    if on_eventloop:
        import eventloop_lightning

        kind = eventloop_lightning.Trainer
        given["settings"] = {"autoload": False}
    else:
        strategies = lightning.pytorch.strategies
        given["strategy"] = strategies.SingleDeviceStrategy(device, accelerator=Pretend())
    trainer = kind(
        max_steps=STEPS, gradient_clip_val=CLIP, log_every_n_steps=100,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **given,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(DATA, 16))


class Labelled(Dataset[Any]):
    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, idx: int) -> Any:
        return {"inputs": DATA[idx][0], "labels": DATA[idx][1]}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, inputs: Any, labels: Any) -> Any:
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


def of_transformers(device: torch.device, begins: Count, *, on_eventloop: bool = False) -> None:
    import transformers
    from accelerate import PartialState

    class Begins(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **given: Any) -> None:
            begins()

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, per_device_train_batch_size=16, max_steps=STEPS, max_grad_norm=CLIP,
            optim="sgd", logging_steps=100, save_strategy="no", report_to=[], disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        args.__dict__["_setup_devices"] = PartialState().device = device  # else it is the CPU
        kind: Any = transformers.Trainer
        if on_eventloop:
            import eventloop_transformers

            kind = eventloop_transformers.Trainer
        kind(WithLoss(), args, train_dataset=Labelled(), callbacks=[Begins()]).train()


def of_composer(device: torch.device, begins: Count, *, on_eventloop: bool = False) -> None:
    import composer
    import composer.algorithms
    from composer.devices import DeviceCPU

    class Pretend(DeviceCPU):  # type: ignore[misc]
        def __init__(self) -> None:
            self._device = device

        def module_to_device(self, module: Any) -> Any:
            return module.to(device)

        def tensor_to_device(self, tensor: Any) -> Any:
            return tensor.to(device)

    class Module(composer.models.ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any, *_: Any) -> Any:
            return cross_entropy(outputs, batch[1])

    class Begins(composer.Callback):  # type: ignore[misc]
        def batch_start(self, *_: Any) -> None:
            begins()

    net = Module()
    kind, place, given = composer.Trainer, Pretend(), {}
    if on_eventloop:
        import eventloop_composer

        kind = eventloop_composer.Trainer
        place, given = "gpu", {"precision": "fp32", "settings": {"autoload": False}}
    kind(
        model=net, train_dataloader=DataLoader(DATA, 16), max_duration=f"{STEPS}ba",
        optimizers=torch.optim.SGD(net.parameters(), lr=0.1), device=place,
        algorithms=[composer.algorithms.GradientClipping("norm", CLIP)], callbacks=[Begins()],
        progress_bar=False, **given,
    ).fit()  # fmt: skip


# Each with what it imports: before the device is there, on which TorchScript doesn't run.
LOOPS: dict[str, tuple[str, Any]] = {
    "plain loop": ("torch", plain),
    "eventloop": ("eventloop", of_eventloop),
    "ignite": ("ignite.engine", of_ignite),
    "Lightning": ("lightning", of_lightning),
    "Lightning's module on eventloop": (
        "eventloop_lightning",
        functools.partial(of_lightning, on_eventloop=True),
    ),
    "transformers": ("transformers", of_transformers),
    "transformers' trainer on eventloop": (
        "eventloop_transformers",
        functools.partial(of_transformers, on_eventloop=True),
    ),
    "Composer": ("composer", of_composer),
    "Composer's trainer on eventloop": (
        "eventloop_composer",
        functools.partial(of_composer, on_eventloop=True),
    ),
}


def counted(module: str, run: Callable[[torch.device, Count], None]) -> dict[str, Any]:
    """Returns the reads of a step, in all and by line; or why there are none."""
    begun: list[int] = []
    try:
        importlib.import_module(module)
    except ImportError as error:
        return {"problem": f"not installed: {error}"}
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with pretend_device() as device, counted_waits() as waits, quiet[0], quiet[1]:
        try:
            run(device, lambda: begun.append(len(waits)))
        except Exception as error:  # noqa: BLE001  a framework that can't use the device
            return {"problem": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        reads = [one for one in waits[begun[1] : begun[2]] if not one.how.startswith("copy to")]
    lines = collections.Counter(f"{one.how}, {one.where}" for one in reads)
    return {"reads": len(reads), "lines": dict(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        importlib.import_module("eventloop_composer.importing").declare_operators()
    rows = {name: counted(*loop) for name, loop in LOOPS.items()}
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("loop", "reads of a step", "where", title="host reads, pretend accelerator")
    for name, row in rows.items():
        where = "\n".join(f"{num} x {line}" for line, num in row.get("lines", {}).items())
        table.add_row(name, str(row.get("reads", "")), where or row.get("problem", ""))
    Console().print(table)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
