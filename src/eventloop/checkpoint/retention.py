"""Which checkpoints of a run are kept: the newest, the best, and one that is usable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from eventloop.checkpoint.store import AnyPlace, FoundCheckpoint

Item = TypeVar("Item")


def to_keep(
    found: Iterable[FoundCheckpoint[Any]], num_newest: int, written: int, best: int | None
) -> set[int]:
    """Returns the batch counts of the checkpoints that stay when one has been written.

    One that isn't finite stays until the next is written, and takes the place of no other.

    Args:
        found: the newest first.
        best: of the best evaluation, if there is one.
    """
    usable = [one.batch for one in found if not one.reason]
    return {*usable[:num_newest], written, *([] if best is None else [best])}


def newest_after(
    batch: int, found: Iterable[FoundCheckpoint[AnyPlace]], is_usable: Callable[[AnyPlace], bool]
) -> int | None:
    """Returns the batch count of the newest usable checkpoint after `batch`, if any.

    Args:
        found: the newest first, not verified.
        is_usable: reads and verifies a whole checkpoint.
    """
    newer = (one for one in found if one.batch > batch and not one.reason)
    return next((one.batch for one in newer if is_usable(one.path)), None)


def surplus(
    keep: Sequence[Item], others: Sequence[Item], is_usable: Callable[[Item], bool]
) -> list[Item]:
    """Returns those of `others` that can be deleted, the oldest first; one that is usable is kept."""
    if not others:
        return []
    safe = next((one for one in [*keep, *others] if is_usable(one)), None)
    return [] if safe is None else [one for one in reversed(others) if one != safe]
