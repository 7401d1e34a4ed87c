"""The working directory may come from elsewhere: modules and plugins aren't looked for in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
TASK = """
import torch

from eventloop import Task
from helper_of_task import SIZE


def task():
    inputs = torch.randn(12, SIZE, generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.TensorDataset(inputs, inputs.argmax(1))
    return Task(
        model=lambda: torch.nn.Linear(SIZE, SIZE),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=torch.utils.data.DataLoader(batches, batch_size=4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        settings={"max_duration": "1ep", "device": "cpu"},
    )
"""
TRACE = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Returns a folder with modules that leave a trace, an installed plugin among them."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "train.py").write_text(TASK)
    (tmp_path / "task" / "helper_of_task.py").write_text("SIZE = 3\n")
    folder = tmp_path / "stranger"
    folder.mkdir()
    for name in ("eventloop", "torch", "numpy", "rich", "pluggy", "evil_plugin"):
        (folder / f"{name}.py").write_text(TRACE)
    (folder / "evil-1.0.dist-info").mkdir()
    (folder / "evil-1.0.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1.0\n")
    (folder / "evil-1.0.dist-info" / "entry_points.txt").write_text(
        "[eventloop]\nevil = evil_plugin\n"
    )
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ran"))


# As the script of the entry point does: its own folder is first on the path, not the working directory.
COMMAND = ("-P", "-c", "import sys; from eventloop.cli import main; sys.exit(main())")


@pytest.mark.parametrize("nproc", [(), ("--nproc", "2")])
def test_the_command_imports_nothing_from_the_working_directory(stranger, nproc):
    """Neither in one process nor in ranks; --no-plugins lists all plugins, and neighbours are imported."""
    ran = run(
        stranger, *COMMAND, "fit", "../task/train.py", "--run-dir", "../run", "--no-plugins", *nproc
    )

    assert ran.returncode == 0, ran.stderr
    assert traces(stranger) == []
    assert "evil" not in ran.stdout


def test_python_m_imports_nothing_from_the_working_directory(stranger):
    """Python puts it first; what Python itself reads before eventloop is named like it alone."""
    (stranger / "eventloop.py").unlink()

    ran = run(
        stranger,
        "-m",
        "eventloop",
        "fit",
        "../task/train.py",
        "--run-dir",
        "../run",
        "--no-plugins",
    )

    assert ran.returncode == 0, ran.stderr
    assert traces(stranger) == []
    assert "evil" not in ran.stdout


def test_a_source_tree_that_is_the_working_directory_stays():
    """Eventloop itself was imported from there: it isn't installed."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import eventloop.__main__ as main; "
        "main.leave_out_working_directory(); print(sys.path[0] == sys.argv[1])"
    )

    assert run(SOURCE, "-c", code, str(SOURCE)).stdout == "True\n"
