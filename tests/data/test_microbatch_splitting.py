"""Microbatches: which samples each piece of a batch has."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from eventloop.data.batches import (
    inputs_of,
    num_samples,
)
from eventloop.data.microbatch_splitting import split
from eventloop.errors import TaskError


class Pair(NamedTuple):
    inputs: object
    targets: object


X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


def test_slices_are_even_but_for_the_last(nest):
    """Five samples in twos: 2, 2, 1; together they are the batch."""
    pieces = split(nest, 2)

    assert [num_samples(piece) for piece in pieces] == [2, 2, 1]
    assert all(type(piece) is type(nest) for piece in pieces)
    assert torch.equal(torch.cat([inputs_of(piece)["input_ids"] if isinstance(piece, dict)
                                  else inputs_of(piece) for piece in pieces]), X)  # fmt: skip


@pytest.mark.parametrize("size", [5, 6, 100])
def test_a_batch_that_fits_stays_in_one_piece(size):
    """The very same object, nothing is rebuilt."""
    batch = (X, Y)

    (piece,) = split(batch, size)

    assert piece is batch


def test_slices_are_views():
    """Slicing costs no memory, which is what it is for."""
    piece = split((X, Y), 2)[1]

    assert piece[0].data_ptr() == X[2:].data_ptr()


def test_lists_of_plain_values_are_sliced_and_scalars_repeated():
    """Five captions belong to five samples; one temperature to all."""
    batch = {"x": X, "captions": list("abcde"), "temperature": torch.tensor(2.0), "task": "copy"}

    pieces = split(batch, 3)

    assert [piece["captions"] for piece in pieces] == [list("abc"), list("de")]
    assert [piece["temperature"].item() for piece in pieces] == [2.0, 2.0]
    assert [piece["task"] for piece in pieces] == ["copy", "copy"]


def test_tensors_that_disagree_can_not_be_split():
    """Which dimension holds the samples is the task's knowledge."""
    with pytest.raises(
        TaskError, match=r"can't be split.*batch\['codes'\] has 3[\s\S]*split_batch"
    ):
        split({"x": X, "codes": torch.zeros(3, 5)}, 2)


def image(height, num_boxes):
    return torch.zeros(3, height, 5), {"boxes": torch.zeros(num_boxes, 4), "image_id": height}


LISTED = {
    "detection": ([image(4, 3)[0], image(6, 6)[0]], [image(4, 3)[1], image(6, 6)[1]]),
    "zipped": tuple(zip(image(4, 1), image(6, 2), strict=True)),
    "sequences": ([torch.zeros(2, 8), torch.zeros(3, 8)], torch.tensor([0, 1])),
    "numbers": ([torch.zeros(8), torch.zeros(8)], [0, 1]),
    "scalars": Pair([torch.zeros(8), torch.zeros(8)], [torch.tensor(0), torch.tensor(1)]),
    "texts": ([torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)], ["a cat", "a dog"]),
}


@pytest.mark.parametrize("batch", LISTED.values(), ids=LISTED)
def test_lists_with_an_entry_for_each_sample_are_counted_and_split_by_entry(batch):
    """Samples of unequal size can't be stacked; the channels of the first aren't samples."""
    pieces = split(batch, 1)

    assert num_samples(batch) == 2
    assert [type(piece) for piece in pieces] == [type(batch)] * 2
    for idx, piece in enumerate(pieces):
        assert piece[0][0] is batch[0][idx]
        assert len(piece[0]) == len(piece[1]) == 1


def test_a_list_of_mappings_is_sliced_beside_stacked_inputs():
    """The targets of a detector whose images have one size."""
    boxes = [{"boxes": torch.zeros(num, 4)} for num in range(5)]

    pieces = split({"pixel_values": X, "labels": boxes}, 3)

    assert [piece["labels"] for piece in pieces] == [boxes[:3], boxes[3:]]


def test_a_tuple_of_texts_is_sliced_and_other_tuples_are_nests():
    """Torch's collate function makes one of the samples' texts."""
    names, pair = ("a", "b", "c"), (torch.arange(3), torch.arange(3))

    pieces = split([torch.arange(3), names, pair], 2)

    assert [one[1] for one in pieces] == [("a", "b"), ("c",)]
    assert [len(part) for part in pieces[0][2]] == [2, 2]
