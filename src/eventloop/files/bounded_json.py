"""Reads and writes JSON of bounded size, so an untrusted file can't exhaust memory or stack."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from eventloop.files.disk import CorruptFileError

MAX_BYTES = 32 * 2**20
# Each takes up to about 200 bytes as Python's objects.
MAX_ITEMS = 300_000


def to_bytes(value: Any, max_items: int = MAX_ITEMS) -> bytes:
    """Encodes a value as standard JSON in ASCII; raises CorruptFileError if `from_bytes` would."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    _check_size(data, max_items)
    return data


def from_bytes(data: bytes, max_items: int = MAX_ITEMS, encoding: str = "ascii") -> Any:
    """Decodes JSON; raises CorruptFileError if it isn't that, too large or nested too deeply."""
    _check_size(data, max_items)
    try:
        return json.loads(data.decode(encoding), parse_constant=_refuse)
    except RecursionError:
        raise CorruptFileError("its JSON is nested too deeply") from None
    except ValueError as error:  # not ASCII, not JSON, or an int of thousands of digits
        raise CorruptFileError(
            f"it isn't JSON as eventloop writes it ({str(error)[:80]})"
        ) from None


def _check_size(data: bytes, max_items: int) -> None:
    # Text counts, too: to tell it apart would take longer than to refuse a few files more.
    num_items = data.count(b",") + data.count(b"{") + data.count(b"[")
    for number, limit, unit in ((len(data), MAX_BYTES, "bytes"), (num_items, max_items, "items")):
        if number > limit:
            raise CorruptFileError(
                f"its JSON has {number:,} {unit}, of which {limit:,} are allowed"
            )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
