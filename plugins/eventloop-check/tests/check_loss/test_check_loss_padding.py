"""Bugs of padding, rebuilt as small tasks: each is found, with the factor it is wrong by."""

# B = batch, T = position, V = token or class, C = channel

import pytest
import torch
from loss_cases import (
    LENGTH,
    WIDTH,
    TinyText,
    number,
    text_batch,
    text_task,
    token_losses,
    token_mean,
    weighed,
)
from torch import nn

from eventloop_check.check_loss.sequences import Sequences


def loss_ratio(model, batch, found, reference):
    sequences = Sequences.of(batch)
    wrong, right = (model(**getattr(sequences, one)())["loss"] for one in (found, reference))
    return number(wrong / right)


def test_a_loss_that_is_averaged_over_the_padding_too(checked):
    """d2l-ai/d2l-en#2707: from 6 positions to 8, it is 5/7 of the loss; the first label doesn't count."""
    report = checked(
        lambda: text_task(TinyText(lambda logits, labels: token_losses(logits, labels).mean()))
    )

    assert report.factor("padded") == pytest.approx(5 / 7, rel=1e-5)
    assert report.gradient_factor("padded") == pytest.approx(5 / 7, rel=1e-4)
    assert report.differing == {"padded"}
    assert report.causes == {"padded mean"}


@pytest.mark.nightly
def test_labels_of_the_padding_that_are_not_ignored(checked):
    """huggingface/trl#1625: labels are the tokens, those of the padding included."""
    batch = text_batch()
    batch["labels"] = batch["input_ids"].clone()

    report = checked(lambda: text_task(TinyText(token_mean), batch))

    model = TinyText(token_mean)
    for name, method in (("padded", "padded"), ("content", "with_other_padding")):
        expected = loss_ratio(model, batch, method, "short")
        assert abs(expected - 1) > 1e-3
        assert report.factor(name) == pytest.approx(expected, rel=1e-5)
    assert report.differing == {"padded", "content"}
    assert report.causes == {"padded loss"}


class Unmasked(TinyText):
    """Divides by the number of tokens, and adds up the losses of the padding, too."""

    def forward(self, input_ids, attention_mask, labels):
        logits_BTV = self.head(self.tokens(input_ids))
        losses_BT = token_losses(logits_BTV, input_ids)
        return {"logits": logits_BTV, "loss": losses_BT.sum() / attention_mask[:, 1:].sum()}


@pytest.mark.nightly
def test_a_mask_that_is_in_the_denominator_alone(checked):
    """alibaba/ROLL#444: the losses of the padding are in the numerator."""
    report = checked(lambda: weighed(Unmasked(None)))

    expected = loss_ratio(Unmasked(None), text_batch(), "padded", "short")
    assert expected > 1.3
    assert report.factor("padded") == pytest.approx(expected, rel=1e-5)
    assert report.differing == {"padded", "content"}
    assert report.causes == {"padded loss"}


class Pooled(TinyText):
    """Adds the mean over all positions to each, those of the padding included."""

    def hidden(self, input_ids, attention_mask):
        hidden_BTC = self.tokens(input_ids)
        return hidden_BTC + hidden_BTC.mean(1, keepdim=True)


@pytest.mark.nightly
def test_an_attention_mask_that_is_ignored(checked):
    """What is in the padding reaches every output."""
    report = checked(lambda: weighed(Pooled(token_mean)))

    model, batch = Pooled(token_mean), text_batch()
    expected = loss_ratio(model, batch, "padded", "short")
    assert report.factor("padded") == pytest.approx(expected, rel=1e-5)
    assert report.factor("content") == pytest.approx(
        loss_ratio(model, batch, "with_other_padding", "short"), rel=1e-5
    )
    assert report.differing == {"padded", "content"}
    assert report.causes == {"leak"}


class Placed(TinyText):
    """Adds an embedding of the position, counted from the start of the padding."""

    def __init__(self, reduce):
        super().__init__(reduce)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def hidden(self, input_ids, attention_mask):
        return self.tokens(input_ids) + self.places(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )


@pytest.mark.nightly
def test_positions_that_are_counted_from_the_left_padding(checked):
    """huggingface/transformers#3021: GPT-2 without position_ids begins behind the padding."""
    batch = text_batch(is_left=True)

    report = checked(lambda: weighed(Placed(token_mean), batch=batch))

    expected = loss_ratio(Placed(token_mean), batch, "padded", "short")
    assert abs(expected - 1) > 1e-3
    assert report.factor("padded") == pytest.approx(expected, rel=1e-5)
    assert report.differing == {"padded"}
    assert report.causes == {"positions"}
