"""Numbers, durations and names as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping

MOST_CHARS = 100
Results = Mapping[str, Mapping[str, float]]


def short(value: float) -> str:
    """Returns a number in about four digits: 0.4120, 98.20, 12,345, 1.20e-05, nan."""
    if not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return f"{value:,}" if isinstance(value, int) and abs(value) < 1e9 else f"{value:g}"
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:#.4g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"


def per_second(samples_per_s: float) -> str:
    """Returns a speed: 1,234 samples/s."""
    number = f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
    return f"{number} samples/s"


def duration(seconds: float) -> str:
    """Returns a length of time: 3.1 s, 2:05, 1:02:05."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return clock_time(seconds)


def clock_time(seconds: float) -> str:
    """Returns a length of time in whole seconds: 0:03, 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(name: str) -> str:
    """Returns a name with its middle left out where it is too long to be read."""
    return name if len(name) <= MOST_CHARS else f"{name[:60]}...{name[-30:]}"


def printable(name: str, encoding: str) -> str:
    """Returns a name that stays on its line and that a stream of this encoding takes."""
    line = "".join(char if char.isprintable() else "?" for char in name)
    return line.encode(encoding, "replace").decode(encoding)
