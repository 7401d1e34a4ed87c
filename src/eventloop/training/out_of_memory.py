"""Errors of an exhausted memory: how they are recognised, and a note on them that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eventloop.data.batches import shapes
from eventloop.errors import Note, notes_of, text_of
from eventloop.fixes import as_set
from eventloop.training.sharded_tensors import sharded

if TYPE_CHECKING:
    from eventloop.state import State

# Where torch raises a plain RuntimeError: on MPS, on the host, in cuBLAS and cuDNN.
_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the host had no memory left for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error) for words in _NO_MEMORY)


def note_in_training(error: BaseException, state: State) -> None:
    """Notes on an out-of-memory error of a training pass how to train in smaller microbatches; once.

    An optimizer step gets no note: the size of a microbatch doesn't change what it needs.
    """
    if state.microbatch is None or not is_out_of_memory(error) or notes_of(error, "memory"):
        return
    subject = "a microbatch" if state.num_microbatches > 1 else "a batch"
    _note(error, f"{subject} of {shapes(state.microbatch)} in training", _fix_in_training(state))


def note_in_evaluation(error: BaseException, state: State) -> None:
    """Does the same for an evaluation or a prediction, which take each batch as a whole."""
    if state.batch is None or not is_out_of_memory(error) or notes_of(error, "memory"):
        return
    loader = "the data loader to predict for"
    if state.eval_name is not None:
        loader = f"the eval data loader {state.eval_name!r}"
    fix = (
        f"give {loader} a smaller batch_size; microbatch_size splits the batches of training alone"
    )
    _note(error, f"a batch of {shapes(state.batch)} of {loader}", fix)


def _note(error: BaseException, subject: str, fix: str) -> None:
    error.add_note(Note(f"out of memory with {subject}\n  fix  {fix}", "memory"))


def _fix_in_training(state: State) -> str:
    size = state.settings.microbatch_size
    if size == "auto":
        return "one sample doesn't fit; use a smaller model or input, or shard the model"
    if state.owner("split_batch") != "core":
        return (
            "make the batches smaller: give the train data loader a smaller batch_size; this batch isn't "
            "split by the core, so that microbatch_size doesn't apply"
        )
    if any(sharded(param) is not None for param in state.model.parameters()):
        # A pass over shards is collective, and can't be repeated on one rank.
        smaller = max(1, state.count.samples // state.num_microbatches // 2)
        return "train in smaller microbatches: " + as_set(microbatch_size=smaller)
    return "train in microbatches that fit, with the gradient of the whole batch: " + as_set(
        microbatch_size="auto"
    )
