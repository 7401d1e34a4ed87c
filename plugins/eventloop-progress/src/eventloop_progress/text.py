"""Names as a stream takes them."""

from __future__ import annotations


def printable(name: str, encoding: str) -> str:
    """Returns a name that stays on its line and that a stream of this encoding takes."""
    line = "".join(char if char.isprintable() else "?" for char in name)
    return line.encode(encoding, "replace").decode(encoding)
