"""Likely causes of a difference: by the weights of microbatches, the outputs, and which laws break."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eventloop_check.check_loss.compare import LOSS_TOLERANCE
from eventloop_check.check_loss.laws import DRAWS, ORDER, Variant
from eventloop_check.check_loss.measurement import Measurement, Part, Update

_BY_ITEMS = "; in a trainer of transformers, divide the sum by num_items_in_batch"
_BY_LABELS = f"Task(loss_weight=lambda targets: (targets != -100).sum()){_BY_ITEMS}"
_BY_SHIFTED = f"Task(loss_weight=lambda targets: (targets[:, 1:] != -100).sum()){_BY_ITEMS}"
_BY_TOKENS = 'Task(loss_weight=lambda batch: batch["attention_mask"].sum())'


@dataclass(frozen=True)
class Cause:
    """A likely cause of a loss that differs.

    Args:
        kind: short identifier, for programs.
        text: a sentence without its full stop.
        fix: the change to make.
    """

    kind: str
    text: str
    fix: str


# Maximum share of the difference that a cause may leave unexplained.
_CLOSE = 0.1
# The cause for each size by which the mean should be weighted.
_DENOMINATORS: Mapping[str, Cause] = {
    "samples": Cause(
        "samples",
        "a mean over samples, whose parts aren't weighed by their samples",
        "leave Task(loss_weight=...) out: it counts samples by itself",
    ),
    "shifted labels": Cause(
        "tokens",
        "a mean over the labels that count, the first of each sequence apart, whose parts aren't "
        "weighed by them",
        _BY_SHIFTED,
    ),
    "labels": Cause(
        "tokens",
        "a mean over the labels that count, whose parts aren't weighed by them",
        _BY_LABELS,
    ),
    "tokens": Cause(
        "tokens", "a mean over tokens, whose parts aren't weighed by their tokens", _BY_TOKENS
    ),
    "positions": Cause(
        "positions",
        "a mean over all positions, whose parts aren't weighed by them",
        "average over the positions that aren't padding",
    ),
}
SUM = Cause(
    "sum",
    "a sum over the batch: parts of it are averaged",
    "divide by what is summed over, or take reduction='mean'",
)
DIVIDED = Cause(
    "divided",
    "the loss is divided by the number of microbatches, which the loop does already",
    "return the mean over the microbatch, undivided",
)
UNDIVIDED = Cause(
    "undivided",
    "a mean over each microbatch, and nothing divides by the number of microbatches",
    "in a trainer of transformers, compute_loss divides the sum by num_items_in_batch; or set "
    "loss_is_scaled_for_ga=False, for a mean over means",
)
SUM_OR_DIVIDED = Cause(
    "sum",
    "a sum over the batch, or a mean that is divided by the number of parts once more",
    "return the mean over the microbatch: reduction='mean', undivided",
)
WEIGHTS = Cause(
    "weights",
    "not the mean of its parts: it has its own weights, such as class weights, or a term that looks at "
    "the whole batch",
    "give Task(loss_weight=...) the sum of the weights of a batch; declare a term over the batch",
)
PAIRS = Cause(
    "pairs",
    "the loss compares the samples of a batch with each other, as one with in-batch negatives does",
    "write Task(loss_splits=False), which refuses microbatches, and for large batches use "
    "eventloop-gradcache, which joins the outputs of microbatches and ranks before the loss; or "
    "declare it",
)
BATCH_NORM = Cause(
    "batch norm",
    "batch norms in training mode compute over the samples they are given",
    "--sync-batch-norm true for ranks; for microbatches another norm, or statistics that stay; or "
    "declare it",
)
MIXED = Cause(
    "mixed samples",
    "a layer's output for a sample depends on the other samples of its microbatch",
    "let the layer compute sample by sample; or declare it",
)
STATE = Cause(
    "kept state",
    "the model keeps something from sample to sample, which its outputs depend on",
    "let the forward pass use the state from the previous batch, and update it afterwards; or declare it",
)
NEIGHBOURS = Cause(
    "neighbours",
    "the loss pairs samples with their neighbours: labels shifted across samples, say",
    "shift labels within a sample: labels[:, 1:], not labels.flatten()[1:]",
)
CROSSED = Cause(
    "documents",
    "the documents of a pack see each other",
    "tell them apart in attention: use_cache=False for a model of transformers in training, or a "
    "mask by documents",
)
CROSSED_LABELS = Cause(
    "labels",
    "a document of a pack is predicted from the one before it",
    "give the first label of each document the value -100",
)
PADDED_MEAN = Cause(
    "padded mean",
    "the loss is averaged over the padding, too",
    "divide by the number of positions that aren't padding",
)
LEAK = Cause(
    "leak",
    "the content of the padding reaches the outputs: the attention mask isn't used everywhere",
    "pass the attention mask to each layer that mixes positions",
)
POSITIONS = Cause(
    "positions",
    "the outputs depend on the amount of padding: for example because positions are counted from its start",
    "count positions by the attention mask: position_ids = (mask.cumsum(1) - 1).clamp(min=0)",
)
PADDED_LOSS = Cause(
    "padded loss",
    "padded positions count in the loss",
    "give padded positions the label -100, or leave them out by the attention mask",
)
RANDOM = Cause(
    "random",
    "the passes draw random numbers",
    "draw them in the data set, or declare it",
)
UNKNOWN = Cause(
    "unknown",
    "the parts of the batch don't add up to the whole",
    "compare the loss of a single sample alone and among others",
)


def cause_of(
    variant: Variant,
    update: Update,
    single_piece: Measurement,
    siblings: Mapping[str, Update | None],
) -> Cause:
    """Returns the likely cause of a difference.

    Args:
        update: the update that differs.
        single_piece: measurement of the batch in a single piece.
        siblings: the first update that differs in each other variant, by name; None where the law
            holds.
    """
    if variant.law == DRAWS:
        return RANDOM
    if variant.name in ("padded", "content"):
        return _of_padding(update, siblings)
    if variant.batch == "documents":
        return CROSSED_LABELS if update.same_outputs else CROSSED
    outputs_differ = update.same_outputs is False
    if variant.law == ORDER:
        return STATE if outputs_differ or single_piece.moved_buffers else NEIGHBOURS
    if outputs_differ:
        if single_piece.batch_norms:
            return BATCH_NORM
        return STATE if siblings.get("reversed") is not None else MIXED
    cause = _of_denominator(update, siblings)
    if cause is UNKNOWN and single_piece.batch_norms and update.same_outputs is None:
        return BATCH_NORM
    return cause


def _of_padding(update: Update, siblings: Mapping[str, Update | None]) -> Cause:
    if siblings.get("content") is not None:
        return LEAK if update.same_outputs is not True else PADDED_LOSS
    if update.same_outputs is False:
        return POSITIONS
    compared = update.compared
    assert compared is not None
    return PADDED_MEAN if abs(compared.loss_factor) < 1 else PADDED_LOSS


def _of_denominator(update: Update, siblings: Mapping[str, Update | None]) -> Cause:
    """Returns the cause in how microbatches are averaged, found by comparing possible averages."""
    microbatches = update.parts
    compared = update.compared
    assert compared is not None
    expected = compared.reference
    close = min(_CLOSE * abs(compared.loss - expected), LOSS_TOLERANCE * abs(expected))
    means = {
        name: mean for name in _DENOMINATORS if (mean := _mean_by(microbatches, name)) is not None
    }
    errors = {name: abs(mean - expected) for name, mean in means.items()}
    best = min(errors, key=errors.__getitem__, default=None)
    if best is not None and errors[best] <= close:
        return _DENOMINATORS[best]
    if not all(math.isfinite(microbatch.loss) for microbatch in microbatches):
        return UNKNOWN
    is_sum = abs(sum(microbatch.loss for microbatch in microbatches) - expected) <= close
    is_divided = abs(compared.loss * len(microbatches) - expected) <= close
    if is_sum or is_divided:
        ranks_hold = "ranks" in siblings and siblings["ranks"] is None
        if is_divided and (ranks_hold or not is_sum):
            return DIVIDED
        return SUM if not is_divided or siblings.get("ranks") is not None else SUM_OR_DIVIDED
    if any(abs(mean / len(microbatches) - expected) <= close for mean in means.values()):
        return UNDIVIDED
    if siblings.get("reversed") is not None:
        return NEIGHBOURS
    losses = [microbatch.loss for microbatch in microbatches]
    return WEIGHTS if min(losses) <= expected <= max(losses) else PAIRS


def _mean_by(microbatches: Sequence[Part], size_name: str) -> float | None:
    """Returns the mean loss of the microbatches, weighted by one of their sizes.

    None if they have no such size, or if the run already weights them by it: then that size can't be
    the missing weight.
    """
    sized = [(part.sizes.get(size_name, 0), part) for part in microbatches]
    # The mean loss over no elements is NaN: leave such microbatches out.
    counted = [(size, part.loss) for size, part in sized if size]
    total = sum(size for size, _ in counted)
    weights = sum(part.weight for part in microbatches)
    if not total or all(_is_close(size / total, part.weight / weights) for size, part in sized):
        return None
    return sum(size * loss for size, loss in counted) / total


def _is_close(value: float, expected: float) -> bool:
    return abs(value - expected) <= LOSS_TOLERANCE * abs(expected)
