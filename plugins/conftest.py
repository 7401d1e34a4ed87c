"""Makes every plugin of this folder importable, installed or not, so that its tests can run."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: an installed one comes first. Importable isn't active, for it has no entry point.
sys.path.extend(str(one) for one in sorted(Path(__file__).parent.glob("*/src")))
