"""The project's tests use the fixtures that it offers to others, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: an installed one comes first.
sys.path.extend(
    str(Path(__file__).parent / "plugins" / one / "src")
    for one in ("eventloop-check", "eventloop-checkpoints", "eventloop-testing")
)

pytest_plugins = ["eventloop_testing.plugin"]
