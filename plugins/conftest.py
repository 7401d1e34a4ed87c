"""Makes every plugin of this folder importable, installed or not, so that its tests can run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# At the end: an installed one comes first. Importable isn't active, for it has no entry point.
sys.path.extend(str(one) for one in sorted(Path(__file__).parent.glob("*/src")))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums are added up in one order, in forks, too."""
    torch.set_num_threads(1)
