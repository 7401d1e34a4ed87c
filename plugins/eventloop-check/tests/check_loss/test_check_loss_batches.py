"""Batches of the check: some samples, in another order, and padded otherwise."""

import pytest
import torch

from eventloop_check.check_loss.samples import CannotPickError, has_samples, part_of_rank, picked
from eventloop_check.check_loss.sequences import (
    NotPaddedError,
    Sequences,
    num_counted,
    real_positions,
)


def text(rows, pad=0, **more):
    """A batch of token ids, padded where `pad` stands."""
    ids = torch.tensor(rows)
    real = ids != pad
    mask = {"input_ids": ids, "attention_mask": real.long(), "labels": ids.where(real, -100)}
    return {**mask, **more}


# Samples


def test_samples_are_picked_in_any_nest():
    """Tensors along their first dimension, lists by entry, scalars and words as they are."""
    tensor = torch.arange(6).reshape(3, 2)
    batch = {
        "x": (tensor, [tensor[:, 0], torch.tensor(7)]),
        "names": ["a", "b", "c"],
        "kind": "train",
    }

    found = picked(batch, [2, 0])

    assert found["x"][0].tolist() == [[4, 5], [0, 1]]
    assert found["x"][1][0].tolist() == [4, 0]
    assert (found["x"][1][1].item(), found["names"], found["kind"]) == (7, ["c", "a"], "train")


def test_several_inputs_in_a_list_are_no_samples():
    """Two inputs of two samples each: the list isn't shortened."""
    one, other = torch.arange(2), torch.arange(2) + 10

    found = picked(([one, other], torch.arange(2)), [1])

    assert [part.tolist() for part in found[0]] == [[1], [11]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(8)), "a tensor of shape"),
        ({}, "has no samples"),
        ((torch.zeros(2), torch.nn.Linear(1, 1)), "samples of Linear can't be picked"),
    ],
)
def test_a_batch_whose_samples_are_not_told_apart_is_not_cut(batch, message):
    """A wrong guess would be reported as a wrong loss."""
    with pytest.raises(CannotPickError, match=message):
        picked(batch, [0])


def test_two_ranks_have_all_samples_and_unequal_numbers():
    """A mean that doesn't weigh them would be right by chance."""
    for samples in range(2, 10):
        first, second = part_of_rank(samples, 0), part_of_rank(samples, 1)
        assert [*first, *second] == [*range(samples)]
        assert len(first) != len(second) or samples == 2


def test_a_run_without_a_data_loader_has_no_samples():
    """Its batch is empty."""
    assert not has_samples({})
    assert not has_samples((torch.tensor(1), "a"))


# Sequences


def test_sequences_are_cut_to_unequal_lengths_and_padded_again():
    """More padding is behind the same tokens; the mask and the labels say so."""
    rows = [[*range(1, 9)], [*range(11, 17), 0, 0], [*range(21, 29)]]
    sequences = Sequences.of(text(rows, position_ids=torch.arange(8).repeat(3, 1)))

    short, padded = sequences.short(), sequences.padded()

    assert short["input_ids"].tolist() == [
        [1, 2, 3, 4, 0, 0],
        [11, 12, 13, 0, 0, 0],
        [*range(21, 27)],
    ]
    assert torch.equal(short["attention_mask"], (short["input_ids"] > 0).long())
    assert short["labels"][0].tolist() == [1, 2, 3, 4, -100, -100]
    assert padded["input_ids"][:, :6].tolist() == short["input_ids"].tolist()
    assert padded["input_ids"][:, 6:].tolist() == [[0, 0]] * 3
    assert padded["labels"][:, 6:].eq(-100).all()
    assert short["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 0]


def test_padding_on_the_left_stays_on_the_left():
    """A decoder that generates is padded there."""
    rows = [[*range(1, 9)], [0, 0, *range(11, 17)]]

    short = Sequences.of(text(rows)).short()

    assert short["input_ids"].tolist() == [[0, 0, 5, 6, 7, 8], [0, 0, 0, 14, 15, 16]]


def test_the_token_of_the_padding_is_that_of_the_batch_and_then_another():
    """Models pad with the end of a text, too; what stands there must not count."""
    sequences = Sequences.of(text([[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, 8, 1, 2, 3, 4, 9]], pad=9))

    other = sequences.with_other_padding()

    assert sequences.short()["input_ids"][0].tolist() == [1, 2, 3, 4, 9, 9]
    assert other["input_ids"][0].tolist() == [1, 2, 3, 4, 1, 1]
    assert torch.equal(other["labels"], sequences.short()["labels"])


def test_labels_that_are_ignored_show_the_padding_where_there_is_no_mask():
    """A prompt before them isn't padding, though its labels are ignored."""
    ids = torch.arange(1, 17).reshape(2, 8)
    labels = ids.clone()
    labels[0, :2] = labels[0, 6:] = labels[1, :1] = -100
    ids[0, 6:] = 0

    assert real_positions((ids, labels)).sum(1).tolist() == [6, 8]
    found, targets = Sequences.of((ids, labels)).short()
    assert found.tolist()[0] == [1, 2, 3, 4, 0, 0]
    assert targets.tolist()[0] == [-100, -100, 3, 4, -100, -100]


def test_what_has_no_such_positions_stays_as_it_is():
    """Labels of sequences that are classified, say."""
    batch = {**text([[1, 2, 3, 4], [5, 6, 0, 0]]), "labels": torch.tensor([1, 0])}

    short = Sequences.of(batch).short()

    assert short["labels"].tolist() == [1, 0]
    assert short["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), "isn't one of padded sequences"),
        ((torch.ones(4, 8).long(), torch.ones(4, 8).long()), "no attention_mask, no label -100"),
        (text([[1, 0, 2, 3, 4]]), "gaps"),
        (text([[1, 2, 0]]), "too few to cut"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention mask has the shape"),
        (
            {**text([[1, 2, 3, 4]]), "labels": torch.tensor([[-100, -100, -100, 4]])},
            "no label left",
        ),
    ],
)
def test_padding_that_is_not_understood_is_left_alone(batch, message):
    """With the reason."""
    with pytest.raises(NotPaddedError, match=message):
        Sequences.of(batch)


def test_labels_that_count_are_counted_shifted_too():
    """A causal model predicts none for the first position."""
    batch = {"labels": torch.tensor([[1, 2, -100], [-100, 3, 4]])}

    assert num_counted(batch) == 4
    assert num_counted(batch, is_shifted=True) == 3
    assert num_counted((torch.zeros(2), torch.zeros(2))) is None
