"""Which checkpoints may be removed, and which is newer than a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from eventloop.checkpoint.store import AnyPlace, Found

Item = TypeVar("Item")


def newest_after(
    batch: int, found: Iterable[Found[AnyPlace]], is_usable: Callable[[AnyPlace], bool]
) -> int | None:
    """Returns the batch of the newest checkpoint that has more batches and can be used, if any.

    Args:
        found: the newest first; a look at each is all that it took.
        is_usable: reads all of it.
    """
    newer = (one for one in found if one.batch > batch and not one.reason)
    return next((one.batch for one in newer if is_usable(one.path)), None)


def surplus(
    kept: Sequence[Item], others: Sequence[Item], is_usable: Callable[[Item], bool]
) -> list[Item]:
    """Returns which of the others may be removed, the oldest first: one that can be used stays.

    Args:
        kept, others: the newest first.
    """
    if not others:
        return []
    safe = next((one for one in [*kept, *others] if is_usable(one)), None)
    return [] if safe is None else [one for one in reversed(others) if one != safe]
