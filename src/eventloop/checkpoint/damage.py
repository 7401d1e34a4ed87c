"""Why a file of a checkpoint can't be used."""

from __future__ import annotations


class Damage(Exception):  # noqa: N818  what is wrong with a file, not yet what becomes of it
    """A file isn't what its manifest says, or not what eventloop writes; the text is the reason.

    `format` makes a `CheckpointError` of it; `store` goes on to the next checkpoint.
    """
