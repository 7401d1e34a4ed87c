"""Slices of ranks: they make up the whole, and plain tensors are beside them."""

from __future__ import annotations

import torch

from eventloop.training.tensor_slices import TensorSlice, held, holds_slices

WHOLE = torch.arange(15.0).view(5, 3)


def slice_at(row, column, rows, columns):
    part = WHOLE[row : row + rows, column : column + columns]
    return TensorSlice(part, (5, 3), (row, column))


def test_slices_of_all_ranks_make_up_the_whole():
    """Along any dimension; a rank that holds no entry changes none, wherever its slice begins."""
    slices = [
        slice_at(0, 0, 2, 3),
        slice_at(2, 0, 3, 1),
        slice_at(2, 1, 3, 2),
        slice_at(5, 0, 0, 3),
    ]
    whole = torch.zeros(5, 3)

    for one in slices:
        one.put_into(whole)

    assert torch.equal(whole, WHOLE)


def test_what_a_rank_holds_is_plain_tensors():
    """Sums over weights are over the entries that are here."""
    part = slice_at(2, 0, 3, 3)

    entries = held({"sliced": part, "whole": WHOLE})

    assert entries["sliced"] is part.tensor
    assert entries["whole"] is WHOLE
    assert holds_slices({"whole": WHOLE, "sliced": part})
    assert not holds_slices(entries)
