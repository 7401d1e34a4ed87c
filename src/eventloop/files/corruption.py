"""Why a file of a checkpoint can't be used."""

from __future__ import annotations


class CorruptFileError(Exception):
    """A file isn't what its manifest says, or not what eventloop writes; the text is the reason.

    `format` makes a `CheckpointError` of it; `store` goes on to the next checkpoint.

    Args:
        reason: what is wrong, without the name of the file.
        fix: what to do, if it isn't to take another checkpoint.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix

    def of(self, name: str) -> CorruptFileError:
        """Returns the same with the name of the file it is about."""
        return CorruptFileError(f"{name}: {self}", self.fix)
