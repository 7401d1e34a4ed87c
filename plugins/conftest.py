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
    "eventloop-dpo": "peft",
    "eventloop-grpo": "trl",
    "eventloop-hf-checkpoints": "accelerate",
    "eventloop-lightning": "lightning",
    "eventloop-lora": "peft",
    "eventloop-reward": "peft",
    "eventloop-sft": "peft",
    "eventloop-transformers": "accelerate",
}
collect_ignore = [
    folder for folder, module in BRIDGES.items() if importlib.util.find_spec(module) is None
]
if "eventloop-composer" not in collect_ignore:
    from eventloop_composer.importing import declare_operators

    declare_operators()  # so that torchmetrics can import torchvision, for all tests here


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums are added up in one order, in forks, too."""
    torch.set_num_threads(1)
