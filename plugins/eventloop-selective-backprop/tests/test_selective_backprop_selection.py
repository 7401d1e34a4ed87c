"""The maths alone."""

import math
import random

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from eventloop import TaskError
from eventloop_selective_backprop import draw, per_sample, take

LOSSES = [0.3, 2.0, 0.1, 0.9, 0.5, 1.4]


def generator():
    return torch.Generator().manual_seed(0)


def shares(drawn):
    """Returns how often each of six samples was drawn."""
    counts = torch.bincount(torch.cat([torch.as_tensor(one) for one in drawn]), minlength=6)
    return counts / len(drawn)


def drawn_by_hand(num, beta, seed=1):
    """Draws one sample after the other by CDF(loss)^beta, as the paper's formula reads, in float64."""
    numbers, left = random.Random(seed), list(range(6))
    weights = [(sum(one <= loss for one in LOSSES) / 6) ** beta for loss in LOSSES]
    for _ in range(num):
        (idx,) = numbers.choices(left, [weights[i] for i in left])
        left.remove(idx)
    return [idx for idx in range(6) if idx not in left]


@pytest.mark.nightly
@pytest.mark.parametrize(("num", "beta"), [(1, 1.0), (3, 1.0), (2, 2.0), (3, 4.0), (2, 0.0)])
def test_samples_are_drawn_in_proportion_to_their_percentile_to_a_power(num, beta):
    """Equation and footnote of the paper, drawn without replacement."""
    numbers = generator()
    actual = shares([draw(torch.tensor(LOSSES), num, beta, numbers) for _ in range(4000)])
    expected = shares([drawn_by_hand(num, beta, seed) for seed in range(4000)])
    otherwise = shares([drawn_by_hand(num, 2 * beta + 1, seed) for seed in range(4000)])

    torch.testing.assert_close(actual, expected, rtol=0, atol=0.04)
    assert not torch.allclose(actual, otherwise, rtol=0, atol=0.04)


@pytest.mark.nightly
def test_it_is_torchs_draw_without_replacement():
    """torch.multinomial is the same, but waits for the device to look at its weights."""
    percentiles = torch.tensor(LOSSES).argsort().argsort().add(1) / 6
    many = torch.multinomial(percentiles.expand(20_000, 6) ** 2, 3, generator=generator())

    numbers = generator()
    actual = shares([draw(torch.tensor(LOSSES), 3, 2.0, numbers) for _ in range(4000)])

    torch.testing.assert_close(actual, shares(many.unbind()), rtol=0, atol=0.04)


@pytest.mark.parametrize("keep_frac", [0.25, 0.5, 0.8])
def test_the_power_keeps_the_share_of_samples_that_the_paper_would(keep_frac):
    """Drawn each by itself, CDF^beta keeps 1 / (beta + 1) of them, on average."""
    beta = 1 / keep_frac - 1

    mean = (torch.arange(1, 1001, dtype=torch.float64) / 1000).pow(beta).mean().item()

    assert mean == pytest.approx(keep_frac, abs=0.001)


def test_a_draw_is_in_order_and_a_function_of_its_generator():
    """A run that is resumed draws what an unbroken one would have drawn."""
    losses = torch.randn(32, generator=generator())

    first, again = (draw(losses, 16, 1.0, generator()) for _ in range(2))

    assert torch.equal(first, again)
    assert torch.equal(first, first.unique())
    assert len(first) == 16


@pytest.mark.parametrize("beta", [1.0, 200.0])
def test_an_infinite_loss_is_the_highest(beta):
    """Left out, what is wrong with a sample would never be seen; and no weight may vanish."""
    losses = torch.tensor([*LOSSES, math.inf] * 100)
    numbers = generator()

    drawn = torch.cat([losses[draw(losses, 100, beta, numbers)] for _ in range(20)])

    assert drawn.isinf().float().mean() > 1.5 / 7


@pytest.mark.parametrize(("num", "expected"), [(1, {2}), (2, {0, 2}), (4, {0, 2})])
def test_a_sample_without_a_loss_is_never_drawn(num, expected):
    """It teaches nothing; where too few are left, a microbatch of it alone would end the run."""
    losses = torch.tensor([0.1, math.nan, 3.0, math.nan, math.nan])

    drawn = draw(losses, num, 200.0, generator()).tolist()

    assert set(drawn) == expected
    assert len(drawn) == num


def test_where_no_sample_has_a_loss_each_may_be_drawn():
    """The batch has none, either; that is for the run to tell."""
    drawn = draw(torch.full((4,), math.nan), 3, 1.0, generator())

    assert len(drawn.unique()) == 3


@pytest.mark.parametrize(
    ("output", "expected"), [(1.0, [False, True, False]), (math.nan, [False, False, False])]
)
def test_a_sample_whose_targets_are_ignored_has_no_loss(output, expected):
    """But one whose loss makes that of the batch NaN has: the highest, so that it is seen."""
    outputs, targets = values(3, 4), torch.tensor([1, -100, 2])
    outputs[2, 0] = output

    found = per_sample(
        lambda outputs, batch: cross_entropy(outputs, batch[1]), outputs, (outputs, targets)
    )

    assert found.isnan().tolist() == expected
    assert found[2].isinf() == math.isnan(output)


def cross_entropy_of_texts(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)


def summed(outputs, targets):
    return (outputs["a"] - outputs["b"]).square().mean() + targets.mean() * 0


def values(*shape):
    return torch.randn(shape, generator=generator())


CLASSES = torch.tensor([0, 2, 1, 2])
TEXTS = torch.tensor([[1, 2, 0], [1, 1, 1], [0, 2, 2], [2, 2, 2]])
KNOWN = {
    "classes": (cross_entropy, values(4, 3), CLASSES),
    "smooth": (
        lambda outputs, targets: cross_entropy(outputs, targets, label_smoothing=0.1),
        values(4, 3),
        CLASSES,
    ),
    "soft": (cross_entropy, values(4, 3), values(4, 3).softmax(1)),
    "squares": (mse_loss, values(4, 5), values(4, 5).sin()),
    "binary": (binary_cross_entropy_with_logits, values(4), (values(4) > 0).float()),
    "texts": (cross_entropy_of_texts, values(4, 3, 3), TEXTS),
    "mapping": (summed, {"a": values(4, 2), "b": values(4, 2).cos()}, values(4)),
}


@pytest.mark.parametrize(("loss", "outputs", "targets"), KNOWN.values(), ids=KNOWN)
def test_the_loss_of_each_sample_is_that_of_a_batch_of_one(loss, outputs, targets):
    """Whatever the mean is over, and whatever the outputs are nested in."""
    expected = [
        loss(take(outputs, torch.tensor([idx])), targets[idx : idx + 1]) for idx in range(4)
    ]

    found = per_sample(
        lambda outputs, batch: loss(outputs, batch[1]), outputs, (values(4, 8), targets)
    )

    torch.testing.assert_close(found, torch.stack(expected))
    assert found.unique().numel() > 1


def test_it_is_what_torch_gives_without_a_mean():
    """An independent reference for the losses that have one."""
    outputs = values(4, 3)
    expected = cross_entropy(outputs, CLASSES, reduction="none")

    found = per_sample(lambda out, batch: cross_entropy(out, batch[1]), outputs, (outputs, CLASSES))

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"logits": values(4, 3), "loss": values()}, "the loss is part of the outputs"),
        (values(3, 3), "the outputs, one tensor of shape .*, aren't one for each of 4 samples"),
        (object(), "the outputs, object, aren't"),
    ],
)
def test_a_loss_of_the_whole_batch_is_refused(outputs, message):
    """All samples would have the same, and be drawn as by a die."""

    def loss(outputs, batch):
        return outputs["loss"]

    with pytest.raises(ValueError, match=message):
        per_sample(loss, outputs, (values(4, 8), CLASSES))


def test_taken_samples_are_whole_and_everything_else_is_as_it_was():
    """Inputs and targets stay together, in any nest."""
    batch = {"x": values(4, 2), "labels": CLASSES, "more": [values(4), (values(4, 1, 2),)]}
    indices = torch.tensor([1, 3])

    taken = take(batch, indices)

    assert torch.equal(taken["x"], batch["x"][indices])
    assert torch.equal(taken["labels"], torch.tensor([2, 2]))
    assert torch.equal(taken["more"][1][0], batch["more"][1][0][indices])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["a", "b", "c", "d"], "beside tensors of 4 samples the batch holds 'a'"),
        (torch.ones(1, 4), r"batch\[2\] has 1"),
        (torch.ones(()), r"a tensor of shape \(\)"),
    ],
)
def test_what_belongs_to_nobody_knows_which_sample_is_refused(other, message):
    """A name that is left with another sample would be wrong in silence."""
    with pytest.raises((ValueError, TaskError), match=message):
        take((values(4, 2), CLASSES, other), torch.tensor([0]))
