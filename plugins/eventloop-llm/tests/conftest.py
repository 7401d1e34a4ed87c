"""Makes `post_training_pairs` importable; without transformers and peft there is nothing to test here."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if importlib.util.find_spec("peft") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def in_silence(quiet_transformers: None) -> None:
    """Each test has a folder of its own, and transformers' log is quiet."""
