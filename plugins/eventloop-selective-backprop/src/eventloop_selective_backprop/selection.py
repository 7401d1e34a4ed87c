"""The maths of selective backprop: the loss of each sample, and which samples are kept.

Source: Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers",
arXiv:1910.00762, section 3.2: a sample is chosen with the probability CDF(loss)^beta, the
percentile of its loss among recent ones to a power. Here the percentile is among the losses of the
batch, and a fixed number of samples is drawn.
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

    Nothing is read from the device: for each sample an exponential variate divided by its weight is
    drawn, and the samples with the smallest are kept, which equals drawing one after the other. Samples
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
    ranks = torch.arange(num, device=losses.device) % num_known
    return ranked[ranks].sort().values


def per_sample(loss: Callable[[Any, Any], Tensor], outputs: Any, batch: Any) -> Tensor:
    """Returns the loss of each sample, as if it were a batch of its own; computed for all at once.

    Args:
        loss: takes outputs and a batch, gives a tensor of shape ().
        outputs, batch: nests of tensors whose first dimension is the samples'.

    Returns:
        float32, shape (num_samples,). NaN for a sample that adds nothing to the loss of the batch,
        as where all its targets are ignored; infinite where both are NaN: something is wrong.

    Raises:
        ValueError: an output isn't one for each sample, or the loss isn't computed from the outputs.
        RuntimeError: torch can't compute the loss for all samples at once: `torch.func.vmap`.
    """
    num = num_samples(batch)
    nest = (outputs, batch)
    if not any(_is_of_samples(leaf, num) for leaf in _leaves(outputs)):
        raise ValueError(f"the outputs, {describe(outputs)}, aren't one for each of {num} samples")
    unsplit = [leaf for leaf in _leaves(nest) if not _is_of_samples(leaf, num)]

    def loss_of_one(*samples: Tensor) -> Tensor:
        values = iter(samples)
        one_output, one_sample = _replaced(nest, num, lambda _: next(values).unsqueeze(0))
        sample_loss = loss(one_output, one_sample)
        if any(sample_loss is leaf for leaf in unsplit):
            raise ValueError("the loss is part of the outputs, one for the whole batch")
        return sample_loss

    samples = [leaf for leaf in _leaves(nest) if _is_of_samples(leaf, num)]
    losses = torch.func.vmap(loss_of_one)(*samples).float()
    return losses.masked_fill(losses.isnan() & loss(outputs, batch).isnan(), math.inf)


def take(batch: Any, indices: Tensor) -> Any:
    """Returns a batch of only these samples.

    Args:
        batch: a nest of tensors whose first dimension is the samples'.
        indices: int64, shape (num,), on the device of the batch.

    Raises:
        ValueError: the batch holds a value that can't be split by sample.
    """
    num = num_samples(batch)
    for leaf in _leaves(batch):
        if not _is_of_samples(leaf, num):
            kind = describe(leaf) if isinstance(leaf, Microbatches) else repr(leaf)
            kind = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else kind
            raise ValueError(f"beside tensors of {num} samples the batch holds {kind}")
    return _replaced(batch, num, lambda tensor: tensor[indices])


def _is_of_samples(value: Any, num: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == num


def _leaves(nest: Any) -> Iterator[Any]:
    """Yields the leaves of a nest, in the order of `map_tensors`."""
    if isinstance(nest, (tuple, list)):
        for value in nest:
            yield from _leaves(value)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from _leaves(value)
    else:
        yield nest


def _replaced(nest: Any, num: int, function: Callable[[Tensor], Tensor]) -> Any:
    return map_tensors(lambda leaf: function(leaf) if _is_of_samples(leaf, num) else leaf, nest)
