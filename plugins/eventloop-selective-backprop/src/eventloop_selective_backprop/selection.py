"""The maths of selective backprop: the loss of each sample, and which samples are kept.

Source: Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers",
arXiv:1910.00762, section 3.2: a sample is chosen with the probability CDF(loss)^beta, the
percentile of its loss among recent ones to a power. Here the losses are those of the batch, and a
fixed number is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eventloop.toolbox import Microbatches, describe, map_tensors, num_samples


def draw(losses: Tensor, num: int, beta: float, generator: torch.Generator) -> Tensor:
    """Draws samples without replacement, each in proportion to its loss's percentile to a power.

    Nothing is read from the device: for each sample an exponential variate over its weight is
    drawn, and the smallest are taken, which is the same as drawing one after the other. Samples
    whose loss is NaN aren't drawn: where fewer than `num` are left, these are drawn several times.

    Args:
        losses: shape (num_samples,), on the device of `generator`; infinite is the highest. If all
            are NaN, each is as good as the others.
        num: how many to draw, 1 to num_samples.
        beta: how strongly high losses are preferred; 0: not at all. With every sample drawn by
            itself, the share of 1 / (beta + 1) would be kept.

    Returns:
        int64, shape (num,): the indices, ascending.

    Source: Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir", for the drawing.
    """
    order = losses.float().argsort(stable=True)
    percentiles = torch.empty_like(losses, dtype=torch.float32)
    steps = torch.arange(1, len(losses) + 1, device=losses.device, dtype=torch.float32)
    percentiles[order] = steps / len(losses)
    variates = torch.empty_like(percentiles).exponential_(generator=generator)
    # Logarithms, because a small percentile to a high power is 0 in float32.
    keys = variates.log() - beta * percentiles.log()
    has_none = losses.isnan()
    num_known = (~has_none).sum()
    num_known = torch.where(num_known > 0, num_known, len(losses))
    ranked = keys.masked_fill(has_none, math.inf).argsort(stable=True)
    # A microbatch of nothing but samples without a loss would have none, either.
    places = torch.arange(num, device=losses.device) % num_known
    return ranked[places].sort().values


def per_sample(loss: Callable[[Any, Any], Tensor], outputs: Any, batch: Any) -> Tensor:
    """Returns the loss of each sample: what a mean over a batch is for batches of one, all at once.

    Args:
        loss: takes outputs and a batch, gives a tensor of shape ().
        outputs, batch: nests of tensors whose first dimension is the samples'.

    Returns:
        float32, shape (num_samples,). NaN for a sample that adds nothing to the loss of the batch,
        as where all its targets are ignored; infinite where both are NaN: something is wrong.

    Raises:
        ValueError: the outputs aren't one for each sample, or the loss isn't computed from them.
        RuntimeError: torch can't compute the loss for all samples at once: `torch.func.vmap`.
    """
    num = num_samples(batch)
    nest = (outputs, batch)
    if not any(_is_of_samples(one, num) for one in _leaves(outputs)):
        raise ValueError(f"the outputs, {describe(outputs)}, aren't one for each of {num} samples")
    whole = [one for one in _leaves(nest) if not _is_of_samples(one, num)]

    def alone(*samples: Tensor) -> Tensor:
        rest = iter(samples)
        one_output, one_sample = _replaced(nest, num, lambda _: next(rest).unsqueeze(0))
        found = loss(one_output, one_sample)
        if any(found is one for one in whole):
            raise ValueError("the loss is part of the outputs, one for the whole batch")
        return found

    samples = [one for one in _leaves(nest) if _is_of_samples(one, num)]
    losses = torch.func.vmap(alone)(*samples).float()
    return losses.masked_fill(losses.isnan() & loss(outputs, batch).isnan(), math.inf)


def take(batch: Any, indices: Tensor) -> Any:
    """Returns the batch with these samples alone.

    Args:
        batch: a nest of tensors whose first dimension is the samples'.
        indices: int64, shape (num,), on the device of the batch.

    Raises:
        ValueError: something else is in it, which can't be split by sample.
    """
    num = num_samples(batch)
    for one in _leaves(batch):
        if not _is_of_samples(one, num):
            what = describe(one) if isinstance(one, Microbatches) else repr(one)
            what = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else what
            raise ValueError(f"beside tensors of {num} samples the batch holds {what}")
    return _replaced(batch, num, lambda tensor: tensor[indices])


def _is_of_samples(value: Any, num: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == num


def _leaves(nest: Any) -> Iterator[Any]:
    """Yields what a nest holds, in the order of `map_tensors`."""
    if isinstance(nest, (tuple, list)):
        for value in nest:
            yield from _leaves(value)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from _leaves(value)
    else:
        yield nest


def _replaced(nest: Any, num: int, function: Callable[[Tensor], Tensor]) -> Any:
    return map_tensors(lambda one: function(one) if _is_of_samples(one, num) else one, nest)
