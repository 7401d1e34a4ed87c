"""Without the bridges' environment there is nothing to test here."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("accelerate") is None:
    collect_ignore_glob = ["test_*.py"]
