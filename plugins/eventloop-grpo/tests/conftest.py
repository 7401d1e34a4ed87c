"""Makes `grpo_cases` importable; without TRL there is nothing to compare with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
if importlib.util.find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
