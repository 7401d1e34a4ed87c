"""The maths alone."""

import re

import pytest
import torch

from eventloop_seq_length_warmup import full_length, length_at, reshape, truncate


def tokens(batch=2, length=8):
    return torch.arange(batch * length).reshape(batch, length)


@pytest.mark.parametrize("increment", [1, 8])
@pytest.mark.parametrize(("full", "shortest", "steps"), [(64, 8, 10), (1024, 64, 97), (60, 8, 7)])
def test_lengths_are_the_formula_of_the_paper(full, shortest, steps, increment):
    """Its section 4 with whole numbers: s + (e - s) * t / T, less what is over a multiple."""
    for step in range(steps):
        exact = (shortest * steps + (full - shortest) * step) // steps
        expected = exact - exact % increment

        assert length_at(full, shortest, increment, step / steps) == expected

    assert length_at(full, shortest, increment, 1.0) == full


@pytest.mark.parametrize(
    ("full", "shortest", "increment", "done", "length"),
    [(64, 3, 8, 0.0, 8), (6, 8, 8, 0.0, 6), (6, 2, 8, 0.5, 6), (60, 8, 8, 0.999, 56)],
)
def test_a_length_is_at_least_one_increment_and_at_most_the_whole(
    full, shortest, increment, done, length
):
    """A sequence that is shorter than the shortest stays whole."""
    assert length_at(full, shortest, increment, done) == length


def test_truncation_keeps_the_first_tokens():
    """Of inputs, targets and whatever stands beside them."""
    pair = truncate((tokens(), tokens() + 1), 3)
    mapping = truncate({"input_ids": tokens(), "labels": tokens()}, 3)

    assert torch.equal(pair[0], torch.tensor([[0, 1, 2], [8, 9, 10]]))
    assert torch.equal(pair[1], pair[0] + 1)
    assert torch.equal(mapping["labels"], pair[0])
    assert pair[0].is_contiguous()  # a task may call .view


def test_reshaping_keeps_the_tokens_and_their_order():
    """But for those that are over at the end of each sequence."""
    inputs, targets = reshape((tokens(), tokens() + 1), 3)

    assert torch.equal(inputs, torch.tensor([[0, 1, 2], [3, 4, 5], [8, 9, 10], [11, 12, 13]]))
    assert torch.equal(targets, inputs + 1)


def test_more_dimensions_stay():
    """As of probabilities for each token."""
    soft = torch.randn(2, 8, 5)

    assert truncate((tokens(), soft), 3)[1].shape == (2, 3, 5)
    assert torch.equal(reshape((tokens(), soft), 4)[1], soft.reshape(4, 4, 5))


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        (tokens(), "one tensor of shape (2, 8) has no tensor of tokens"),
        ({"pixels": tokens()}, "dict with 'pixels' has no tensor of tokens"),
        ((tokens().float(), tokens()), "torch.float32 of shape (2, 8) is not a batch of tokens"),
        ((tokens()[0], tokens()[0]), "torch.int64 of shape (8,) is not a batch of tokens"),
        ((tokens(), torch.zeros(2)), "targets of shape (2,) aren't one for each of 2 x 8 tokens"),
        ({"input_ids": tokens(), "labels": torch.zeros(2)}, "its labels of shape (2,)"),
        ({"input_ids": tokens(), "mask": torch.zeros(2, 8, 8)}, "its mask of shape (2, 8, 8)"),
        ({"input_ids": tokens(), "text": ["a", "b"]}, "its text are list of 2"),
    ],
)
def test_what_is_no_batch_of_sequences_is_named(batch, shown):
    """Labels of a whole text, and masks over pairs of tokens, can't be cut alike."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        full_length(batch)


def test_pairs_and_mappings_are_sequences():
    """As language models take them."""
    mask = torch.ones(2, 8)

    assert full_length((tokens(), tokens())) == 8
    assert full_length({"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}) == 8
