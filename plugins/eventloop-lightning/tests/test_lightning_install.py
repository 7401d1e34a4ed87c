"""Code that imports `pytorch_lightning`, makes a trainer by itself, or reads its arguments from a command line."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from eventloop_lightning import Trainer

# Each is a process that imports Lightning.
BOTH = [pytest.param("lightning.pytorch", marks=pytest.mark.nightly), "pytorch_lightning"]
WHEN = [pytest.param("before", marks=pytest.mark.nightly), "after"]
TRAINS = """
    import torch
    from {library} import LightningModule
    from {library} import Trainer as Theirs
    {imports}
    from torch.utils.data import DataLoader, TensorDataset

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def weights(kind, **more):
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(torch.randn(12, 4)), 4, shuffle=True)
        module = Net()
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        kind(max_epochs=2, accelerator="cpu", **dict.fromkeys(quiet, False), **more).fit(module, data)
        return [one.tolist() for one in module.parameters()]

    settings = {{"autoload": False}}
"""


def ran_in(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of a folder in a process that imports what this one does.

    Beside Composer there is a torchvision for CUDA, whose operators are declared first, as
    `plugins/conftest.py` does here.
    """
    if importlib.util.find_spec("composer") is not None:
        (folder / "sitecustomize.py").write_text(
            "from eventloop_composer.importing import declare_operators\ndeclare_operators()\n"
        )
    return subprocess.run(
        [sys.executable, "-W", "ignore", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(code: str, folder: Path, *, library: str, imports: str = "") -> list[str]:
    """Runs code in a process of its own, after what trains; returns the lines that it printed."""
    text = textwrap.dedent(TRAINS.format(library=library, imports=imports)) + textwrap.dedent(code)
    (folder / "script.py").write_text(text)
    ran = ran_in(folder, "script.py")
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]


@pytest.mark.nightly
@pytest.mark.parametrize("library", BOTH)
def test_a_module_of_either_package_is_trained(library, tmp_path):
    """Most libraries import the second; what is imported afterwards is what it was."""
    code = """
        assert "lightning" not in sys.modules or Theirs.__module__.startswith("lightning.")
        print("RESULT", weights(Ours, settings=settings) == weights(Theirs), issubclass(Ours, Theirs))
        import lightning.pytorch
        print("RESULT", lightning.pytorch.Trainer is Theirs)
    """
    imports = "import sys; from eventloop_lightning import Trainer as Ours"

    lines = printed(code, tmp_path, library=library, imports=imports)

    assert lines == ["RESULT True True", f"RESULT {library == 'lightning.pytorch'}"]


@pytest.mark.nightly
@pytest.mark.parametrize("when", WHEN)
def test_a_library_that_makes_its_own_trainer_gets_ours(when, tmp_path):
    """Whether it was imported before the line or comes after it; the settings are those of the line."""
    (tmp_path / "library.py").write_text(
        "from lightning.pytorch import Trainer\n\ndef make(**given):\n    return Trainer(**given)\n"
    )
    lines = ["import library", "import eventloop_lightning",
             "eventloop_lightning.install(settings={'autoload': False, 'run_dir': 'run'})"]  # fmt: skip
    if when == "after":
        lines = [*lines[1:], lines[0]]
    code = """
        expected = weights(held[0])
        print("RESULT", weights(library.make) == expected, len(list(Path("run/checkpoints").iterdir())) > 0)
        from lightning.pytorch import Trainer
        print("RESULT", isinstance(library.make(logger=False), Trainer), Trainer.__name__)
    """
    imports = "; ".join(["from pathlib import Path", "held = [Theirs]", *lines])

    assert printed(code, tmp_path, library="lightning.pytorch", imports=imports) == [
        "RESULT True True",
        "RESULT True Trainer",
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("when", WHEN)
def test_a_library_that_derives_a_trainer_derives_it_from_ours(when, tmp_path):
    """As scvi-tools does; its own class is made before the line or after it."""
    (tmp_path / "library.py").write_text(
        "from lightning.pytorch import Trainer as Base\n\n"
        "class Trainer(Base):\n    def __init__(self, **given):\n        super().__init__(**given)\n"
    )
    lines = ["import library", "import eventloop_lightning",
             "eventloop_lightning.install(settings={'autoload': False, 'run_dir': 'run'})"]  # fmt: skip
    if when == "after":
        lines = [*lines[1:], lines[0]]
    code = """
        expected = weights(held[0])
        print("RESULT", weights(library.Trainer) == expected, Path("run/checkpoints").is_dir())
    """
    imports = "; ".join(["from pathlib import Path", "held = [Theirs]", *lines])

    lines = printed(code, tmp_path, library="lightning.pytorch", imports=imports)

    assert lines == ["RESULT True True"]


@pytest.mark.nightly
@pytest.mark.parametrize("library", BOTH)
def test_of_both_packages_the_first_that_was_imported_counts(library, tmp_path):
    """A library of the second may bring the first along, as neuralforecast does; arguments can be asked for."""
    code = f"""
        eventloop_lightning.install(settings=settings)
        held = sys.modules["{library}"].Trainer
        print("RESULT", issubclass(held, eventloop_lightning.Trainer))
        print("RESULT", "devices" in inspect.signature(held.__init__).parameters)
        print("RESULT", lightning.pytorch.Trainer is held)
    """
    imports = (
        "import inspect, sys; import lightning.pytorch, pytorch_lightning, eventloop_lightning"
    )

    lines = printed(code, tmp_path, library=library, imports=imports)

    first = library == "lightning.pytorch"
    assert lines == ["RESULT True", "RESULT True", f"RESULT {first}"]


def test_the_signature_has_lightnings_arguments_and_ours():
    """Editors and command lines read it."""
    theirs = inspect.signature(pl.Trainer).parameters

    ours = inspect.signature(Trainer).parameters

    assert list(ours) == [*theirs, "settings", "algorithms", "watchers", "leave_out"]
    assert all(ours[name] == one for name, one in theirs.items())


def test_lightnings_command_line_trains_with_it(tmp_path, monkeypatch):
    """`LightningCLI(trainer_class=...)` makes options of the arguments."""
    options = ["--trainer.max_steps=3", "--trainer.logger=false", "--trainer.accelerator=cpu",
               "--trainer.settings={autoload: false}", "--trainer.limit_val_batches=1"]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", *options])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which it sets for the process
        monkeypatch.setenv(name, "0")

    cli = LightningCLI(BoringModel, BoringDataModule, trainer_class=Trainer)

    assert type(cli.trainer) is Trainer
    assert cli.trainer.global_step == 3
