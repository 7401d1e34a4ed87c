"""What a pass was given when it failed: a note on its exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.data.batches import shapes
from eventloop.errors import EventloopError, Note, notes_of

if TYPE_CHECKING:
    from eventloop.state import State

# The actions whose owners are given a batch, or the outputs for one.
ACTIONS = ("forward", "eval_forward", "predict_forward", "loss")


def note_given(error: BaseException, what: str, state: State) -> None:
    """Notes on an exception what a pass was given, at which batch; once, on what isn't our own.

    Args:
        what: forward, loss, or a metric.
    """
    if isinstance(error, EventloopError) or not isinstance(error, Exception):
        return
    if notes_of(error, "given"):
        return
    batch = state.batch if state.microbatch is None else state.microbatch
    if what.endswith("forward"):
        given = f"a batch of {shapes(batch)}"
    else:
        given = f"outputs {shapes(state.outputs)}, targets {shapes(state.targets)}"
    error.add_note(Note(f"{what} was given {given}; {_place(state)}", "given"))


def _place(state: State) -> str:
    """Says which batch is under way."""
    if state.eval_name is not None:
        return f"batch {state.eval_batch_idx + 1} of the eval set {state.eval_name!r}"
    if state.microbatch is None:
        return "in a prediction"
    part = f", microbatch {state.microbatch_idx + 1} of {state.num_microbatches}"
    several = part if state.num_microbatches > 1 else ""
    return f"epoch {state.clock.epoch}, batch {state.clock.batch + 1}{several}"
