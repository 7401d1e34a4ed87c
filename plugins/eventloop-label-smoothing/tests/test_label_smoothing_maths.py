"""The maths alone."""

import functools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from eventloop_label_smoothing import SmoothedCrossEntropy

B, C, T = 6, 5, 4


def drawn(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def indices(*shape):
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(0))


def of_the_paper(logits_BC, targets_B, epsilon):
    """Section 7, sample by sample: H(q', p) with q'(k) = (1 - epsilon) [k = y] + epsilon / K."""
    losses = []
    for logits, target in zip(logits_BC.tolist(), targets_B.tolist(), strict=True):
        log_sum = torch.logsumexp(torch.tensor(logits, dtype=torch.float64), 0).item()
        smoothed = [(1 - epsilon) * (k == target) + epsilon / C for k in range(C)]
        losses.append(-sum(q * (z - log_sum) for q, z in zip(smoothed, logits, strict=True)))
    return torch.tensor(sum(losses) / len(losses), dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
def test_a_smoothed_loss_is_the_formula_of_the_paper(epsilon):
    """Written out in float64, the cross-entropy of smoothed targets is the same number."""
    logits, targets = drawn(B, C), indices(B)

    with SmoothedCrossEntropy(epsilon):
        loss = cross_entropy(logits, targets)

    torch.testing.assert_close(loss, of_the_paper(logits, targets, epsilon))
    assert not torch.allclose(loss, of_the_paper(logits, targets, epsilon / 2))


CALLS = {
    "indices": (drawn(B, C), indices(B), {}),
    "probabilities": (drawn(B, C), drawn(B, C).softmax(1), {}),
    "class weights": (drawn(B, C), indices(B), {"weight": drawn(C).exp()}),
    "ignored targets": (drawn(B, C), indices(B), {"ignore_index": 2}),
    "a sum": (drawn(B, C), indices(B), {"reduction": "sum"}),
    "no reduction": (drawn(B, C), indices(B), {"reduction": "none"}),
    "dense targets": (drawn(B, C, T), indices(B, T), {}),
}


@pytest.mark.parametrize(("logits", "targets", "given"), CALLS.values(), ids=CALLS)
def test_every_kind_of_call_gets_torchs_own_smoothing(logits, targets, given):
    """Weights, ignored targets and the mean are the caller's business, and stay so."""
    expected = cross_entropy(logits, targets, **given, label_smoothing=0.1)

    with SmoothedCrossEntropy(0.1):
        loss = cross_entropy(logits, targets, **given)

    assert torch.equal(loss, expected)
    assert not torch.equal(cross_entropy(logits, targets, **given), expected)


def flattened(logits_BTC, targets_BT):
    return cross_entropy(logits_BTC.flatten(0, 1), targets_BT.flatten())


CRITERIA = {
    "a module": (torch.nn.CrossEntropyLoss(), drawn(B, C), indices(B)),
    "a partial": (functools.partial(cross_entropy, ignore_index=1), drawn(B, C), indices(B)),
    "a function": (flattened, drawn(B, T, C), indices(B, T)),
}


@pytest.mark.parametrize(("criterion", "logits", "targets"), CRITERIA.values(), ids=CRITERIA)
def test_a_call_is_found_wherever_it_stands(criterion, logits, targets):
    """A loss is a task's own function, whose inside nobody else knows."""
    smoothed = SmoothedCrossEntropy(0.1)
    plain = criterion(logits, targets)

    with smoothed:
        loss = criterion(logits, targets)

    assert smoothed.num_calls == 1
    assert not torch.equal(loss, plain)
    assert torch.equal(criterion(logits, targets), plain)


def test_other_losses_stay_as_they_are():
    """A regression beside the classification has no classes to spread over."""
    smoothed = SmoothedCrossEntropy(0.1)
    with smoothed:
        loss = mse_loss(drawn(B, C), drawn(B, C).exp())

    assert torch.equal(loss, mse_loss(drawn(B, C), drawn(B, C).exp()))
    assert smoothed.num_calls == 0


def test_a_loss_that_smooths_itself_is_refused():
    """Neither of two wishes is more right than the other."""
    with pytest.raises(ValueError, match=r"by 0\.2 itself, and shall by 0\.1"):
        with SmoothedCrossEntropy(0.1):
            cross_entropy(drawn(B, C), indices(B), label_smoothing=0.2)


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(epsilon):
    """Torch would train without smoothing, and not say so."""
    with pytest.raises(ValueError, match=r"isn't in \[0, 1\]"):
        SmoothedCrossEntropy(epsilon)


def test_a_loss_that_raises_leaves_nothing_smoothed():
    """The next loss may be anybody's."""
    smoothed = SmoothedCrossEntropy(0.1)
    with pytest.raises(ArithmeticError), smoothed:
        raise ArithmeticError

    cross_entropy(drawn(B, C), indices(B))

    assert smoothed.num_calls == 0
