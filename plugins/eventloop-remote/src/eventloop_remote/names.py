"""Names of checkpoints in a store: `ba00001200`, and `ba00001200.1-ID` for what took its place."""

from __future__ import annotations

import re
import secrets

from eventloop.storage import batch_of, name_of

_NAME = re.compile(r"(?P<of>ba[0-9]{8,20})(?:\.(?P<number>[0-9]{1,6})-[0-9a-f]{8})?")


def key_of(name: str) -> tuple[int, int] | None:
    """Returns the batches in a name, and how many checkpoints it has replaced."""
    found = _NAME.fullmatch(name)
    batch = batch_of(found["of"]) if found else None
    return None if found is None or batch is None else (batch, int(found["number"] or 0))


def successor(name: str) -> str:
    """Returns the name of what replaces a checkpoint; no two processes get the same."""
    batch, number = key_of(name) or (0, 0)
    return f"{name_of(batch)}.{number + 1}-{secrets.token_hex(4)}"
