"""Makes `lora_cases` importable; without peft there is nothing to test here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
if importlib.util.find_spec("peft") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets peft call what transformers has deprecated (peft 0.21, transformers 5.23)."""
    ignored = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(ignored)
