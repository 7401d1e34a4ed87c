"""What a pass was given when it failed: a note on its exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.data.batches import shapes
from eventloop.errors import EventloopError, Note, notes_of

if TYPE_CHECKING:
    from eventloop.state import State

# The actions whose owners are given a batch, or the outputs for one.
ACTIONS = ("forward", "eval_forward", "predict_forward", "loss")


def note_input(error: BaseException, what: str, state: State) -> None:
    """Notes on an exception what a pass was given, at which batch; once, on what isn't our own.

    Args:
        what: forward, loss, or a metric.
    """
    is_own = isinstance(error, EventloopError) or not isinstance(error, Exception)
    if is_own or notes_of(error, "given"):
        return
    inputs = f"outputs {shapes(state.outputs)}, targets {shapes(state.targets)}"
    if what.endswith("forward"):
        batch = state.batch if state.microbatch is None else state.microbatch
        inputs = f"a batch of {shapes(batch)}"
    error.add_note(Note(f"{what} was given {inputs}; {_moment(state)}", "given"))


def _moment(state: State) -> str:
    if state.eval_name is not None:
        return f"batch {state.eval_batch_idx + 1} of the eval set {state.eval_name!r}"
    if state.microbatch is None:
        return "in a prediction"
    part = f", microbatch {state.microbatch_idx + 1} of {state.num_microbatches}"
    several = part if state.num_microbatches > 1 else ""
    return f"epoch {state.clock.epoch}, batch {state.clock.batch + 1}{several}"
