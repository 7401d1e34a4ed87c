"""Taking turns: plugins of which one acts on each batch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eventloop.state import State

__all__ = ["TakesTurns", "has_turn"]


class TakesTurns(Protocol):
    """A plugin that shares its batches with others.

    Attributes:
        takes_turns: what all of them write, "blend" say.
    """

    takes_turns: str


def has_turn(state: State, plugin: TakesTurns) -> bool:
    """Returns whether the batch under way is the plugin's, among the active ones of its kind.

    Those with the same `takes_turns` share the batches: one of them is drawn for each, any as
    often as any other. The draw is a function of the seed and the batch's number, so that all of
    them, all ranks and a resumed run find the same. Who is alone has every turn.
    """
    kind = plugin.takes_turns
    sharing = {
        name: one
        for name, one in state.plugins.items()
        if getattr(one, "takes_turns", None) == kind
    }
    if len(sharing) < 2:
        return True
    draw = random.Random(f"{state.settings.seed}/{kind}/{state.clock.batch}")
    return sharing[draw.choice(sorted(sharing))] is plugin
