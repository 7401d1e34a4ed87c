"""Makes `grpo_cases` importable; without transformers there is nothing to test here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "eventloop-grpo" / "tests"))
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
