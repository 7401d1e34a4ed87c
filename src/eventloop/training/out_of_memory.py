"""Out-of-memory errors: recognizes them, and adds a note with a fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eventloop.data.batches import shapes
from eventloop.errors import Note, notes_of, text_of
from eventloop.fixes import as_set
from eventloop.training.sharded_tensors import sharded

if TYPE_CHECKING:
    from eventloop.state import State

# Parts of messages of plain RuntimeErrors, which torch raises on MPS, on the host, in cuBLAS and cuDNN.
_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error) for words in _NO_MEMORY)


def note_in_training(error: BaseException, state: State) -> None:
    """Adds a note on smaller microbatches to an out-of-memory error of a training pass, at most once.

    Errors of an optimizer step get no note, since its memory doesn't depend on the microbatch size.
    """
    if state.microbatch is None or not is_out_of_memory(error) or notes_of(error, "memory"):
        return
    subject = "a microbatch" if state.num_microbatches > 1 else "a batch"
    _note(error, f"{subject} of {shapes(state.microbatch)} in training", _fix_in_training(state))


def note_in_evaluation(error: BaseException, state: State) -> None:
    """Adds a note on smaller batches to an out-of-memory error of an evaluation or a prediction.

    Neither splits its batches, so `microbatch_size` wouldn't help.
    """
    if state.batch is None or not is_out_of_memory(error) or notes_of(error, "memory"):
        return
    loader = "the data loader to predict for"
    if state.eval_name is not None:
        loader = f"the eval data loader {state.eval_name!r}"
    fix = f"give {loader} a smaller batch_size; microbatch_size only splits batches of training"
    _note(error, f"a batch of {shapes(state.batch)} of {loader}", fix)


def _note(error: BaseException, subject: str, fix: str) -> None:
    error.add_note(Note(f"out of memory with {subject}\n  fix  {fix}", "memory"))


def _fix_in_training(state: State) -> str:
    size = state.settings.microbatch_size
    if size == "auto":
        return "one sample doesn't fit; use a smaller model or input, or shard the model"
    if state.owner("split_batch") != "core":
        return (
            "give the train data loader a smaller batch_size; microbatch_size has no effect, since the "
            "core doesn't split this batch"
        )
    if any(sharded(param) is not None for param in state.model.parameters()):
        # "auto" can't be used: passes of a sharded model are collective, so a rank can't repeat them.
        smaller = max(1, state.count.samples // state.num_microbatches // 2)
        return "train in smaller microbatches: " + as_set(microbatch_size=smaller)
    return "train in microbatches that fit, with the gradient of the whole batch: " + as_set(
        microbatch_size="auto"
    )
