"""Makes `reward_cases` importable; without transformers and peft there is nothing to test here."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "eventloop-sft" / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if importlib.util.find_spec("peft") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets transformers, peft and TRL warn of what they would have otherwise."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a folder of its own, and transformers' log is quiet."""
    from transformers.utils import logging

    monkeypatch.chdir(tmp_path)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
