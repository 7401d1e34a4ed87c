"""Makes the cases and the tools importable; tests of what isn't installed here are left to `tox -e bridges`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path += [str(TESTS), str(TESTS.parent / "tools")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The tests that need neither peft nor TRL nor datasets.
PLAIN = {"test_packed_runs.py", "test_packs.py", "test_rollouts.py"}
if importlib.util.find_spec("peft") is None or importlib.util.find_spec("trl") is None:
    collect_ignore = [path.name for path in TESTS.glob("test_*.py") if path.name not in PLAIN]

# The warnings that a test file ignores. The other files ignore all: transformers, peft and TRL have many.
WARNINGS = {
    "test_packed_runs.py": (),
    "test_packs.py": (),
    # peft calls what transformers has deprecated (peft 0.21, transformers 5.23).
    "test_lora.py": ("ignore:.is_gradient_checkpointing:FutureWarning",),
    "test_lora_ranks.py": ("ignore:.is_gradient_checkpointing:FutureWarning",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores warnings of libraries."""
    for item in items:
        if item.path.parent == TESTS:
            for pattern in WARNINGS.get(item.path.name, ("ignore",)):
                item.add_marker(pytest.mark.filterwarnings(pattern))


@pytest.fixture(autouse=True)
def in_silence(quiet_transformers: None) -> None:
    """Each test has a folder of its own, and transformers' log is quiet."""
