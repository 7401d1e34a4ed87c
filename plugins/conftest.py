"""Makes every plugin of this folder importable, installed or not, so that its tests can run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

# At the end: an installed one comes first. Importable isn't active, for it has no entry point.
sys.path.extend(str(one) for one in sorted(Path(__file__).parent.glob("*/src")))

# What a bridge leads to isn't installed for the tests of the others: `tox -e bridges` has it.
BRIDGES = {
    "eventloop-composer": "composer",
    "eventloop-lightning": "lightning",
    "eventloop-transformers": "accelerate",
}
collect_ignore = [
    folder for folder, module in BRIDGES.items() if importlib.util.find_spec(module) is None
]
if "eventloop-composer" not in collect_ignore:
    from eventloop_composer.importing import declare_operators

    declare_operators()  # so that torchmetrics can import torchvision, for all tests here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores the warnings of transformers in the tests of its bridge."""
    for item in items:
        if "eventloop-transformers" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture
def quiet_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test has a folder of its own, and transformers' log is quiet."""
    from transformers.utils import logging

    monkeypatch.chdir(tmp_path)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums are added up in one order, in forks, too."""
    torch.set_num_threads(1)
