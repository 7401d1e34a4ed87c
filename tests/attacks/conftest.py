"""Makes every plugin of the project importable, installed or not, for the rows of the tables."""

from __future__ import annotations

import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
# At the end: an installed one comes first. Importable isn't active, for it has no entry point.
sys.path.extend(str(one) for one in sorted(PLUGINS.glob("*/src")) if str(one) not in sys.path)
