"""Units of time, as the clock counts them; works without torch.

Attributes:
    FIELDS: The field of the clock that counts each unit: `{"ba": "batch", ...}`.
    UNITS: Every unit that a `Time` can have.
"""

from __future__ import annotations

from eventloop.clock import FIELDS, UNITS

__all__ = ["FIELDS", "UNITS"]
