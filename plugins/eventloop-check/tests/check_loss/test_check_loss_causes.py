"""Causes by the numbers alone: which of several that explain a difference is named."""

import math

import pytest

from eventloop_check.check_loss.causes import cause_of
from eventloop_check.check_loss.compare import Comparison
from eventloop_check.check_loss.laws import VARIANTS
from eventloop_check.check_loss.measurement import Measurement, Part, Update

WHOLE = Measurement([], 4, "", "", "no", [], [], [], [])


def update(losses, sizes, expected, same_outputs=True):
    """Parts that are weighed by their samples, and what they should give."""
    parts = [Part(loss, size["samples"], size) for loss, size in zip(losses, sizes, strict=True)]
    total = sum(one.weight for one in parts)
    loss = sum(one.loss * one.weight for one in parts) / total
    compared = Comparison(loss, expected, expected, 0.9, 0.5, 0.5)
    return Update(0, loss, parts, compared, same_outputs)


def cause(found, name="microbatch-1", whole=WHOLE, **siblings):
    return cause_of(VARIANTS[name], found, whole, siblings).kind


def test_losses_that_are_nearly_equal_still_show_what_weighs_them():
    """At the start of a training every mean is about the same; what weighs them now isn't missing."""
    sizes = [{"samples": 1, "labels": 31}, {"samples": 1, "labels": 3}]
    losses = [4.60, 4.601]

    expected = (31 * losses[0] + 3 * losses[1]) / 34

    assert cause(update(losses, sizes, expected)) == "tokens"


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [({"ranks": None}, "divided"), ({}, "sum"), ({"ranks": "differs"}, "sum")],
)
def test_a_sum_and_a_mean_that_is_divided_again_are_told_apart_by_the_ranks(siblings, expected):
    """In equal microbatches both are the mean by their number."""
    sizes = [{"samples": 1}] * 4

    found = update([0.25, 0.5, 0.75, 1.0], sizes, 2.5)

    assert cause(found, **siblings) == expected


def test_means_that_nothing_divides_by_their_number_are_told_from_pairs():
    """As of a trainer that leaves the number of items out: each part counts whole."""
    sizes = [{"samples": 1, "labels": 31}, {"samples": 1, "labels": 3}]
    losses = [2 * 4.60, 2 * 4.9]

    expected = (31 * losses[0] + 3 * losses[1]) / 34 / 2

    assert cause(update(losses, sizes, expected)) == "undivided"


def test_a_loss_outside_of_its_parts_is_one_over_pairs():
    """No mean of them gives it."""
    sizes = [{"samples": 1}] * 2

    assert cause(update([0.1, 0.3], sizes, 0.9)) == "pairs"
    assert cause(update([0.1, 0.3], sizes, 0.15)) == "weights"


def test_batch_norm_is_the_cause_only_where_the_outputs_may_differ():
    """A model with one may still have a loss with a wrong denominator."""
    normed = Measurement([], 4, "", "", "no", [], [], ["norm"], [])
    sizes = [{"samples": 1, "labels": 3}, {"samples": 1, "labels": 1}]
    by_labels = (3 * 0.2 + 0.6) / 4

    assert cause(update([0.2, 0.6], sizes, by_labels), whole=normed) == "tokens"
    assert cause(update([0.2, 0.6], sizes, 0.35, same_outputs=False), whole=normed) == "batch norm"
    assert cause(update([0.2, 0.6], sizes, 0.35, same_outputs=False)) == "mixed samples"


def test_what_is_not_finite_has_no_known_cause():
    """Where no mean of the finite parts explains it."""
    sizes = [{"samples": 1}] * 2

    assert cause(update([math.nan, 0.3], sizes, 0.9)) == "unknown"
