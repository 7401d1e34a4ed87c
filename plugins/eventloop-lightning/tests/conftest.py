"""Makes `lit_cases` importable; without lightning there is nothing to test here."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
if importlib.util.find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets Lightning warn of what it would have otherwise: few workers, short epochs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a folder of its own, and Lightning's log is quiet."""
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
