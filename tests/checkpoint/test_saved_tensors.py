"""Tensors that stay in their files: a rank reads the slices that it needs, from the files that have them."""

from __future__ import annotations

import pytest
import torch

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.manifest import shard_name
from eventloop.checkpoint.saved_tensors import read_all
from eventloop.errors import CheckpointError
from eventloop.training.tensor_slices import TensorSlice


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("written_by", "dim"), [(4, 0), (4, 1), (None, 0)])
def test_any_number_of_ranks_reads_its_slices(store, slices, world_size, written_by, dim):
    """Of shards, of shards along another dimension, and of whole tensors."""
    path = (
        slices.save(store, written_by, dim=dim)
        if written_by
        else store.save(3, slices.whole, slices.facts)
    )

    for rank in range(world_size):
        left = read_checkpoint(
            path, ["model"], leaving=["model"], nearest=(rank + 0.5) / world_size
        ).parts
        for name in ("wide", "short"):
            wanted = slices.cut(slices.whole["model"][name], rank, world_size)
            if isinstance(wanted, TensorSlice):
                part = left["model"][name].read_slice(wanted.offsets, wanted.tensor.shape)
                assert torch.equal(part, wanted.tensor)
        assert torch.equal(read_all(left)["model"]["wide"], slices.whole["model"]["wide"])


def test_a_rank_opens_no_more_files_than_hold_its_share(store, slices):
    """Of a thousand files each rank reads those of its neighbours alone."""
    path = slices.save(store, 7)
    for rank in range(7):
        (path / shard_name("optimizers", rank)).unlink()
    left = read_checkpoint(path, ["model"], leaving=["model"], nearest=(5 + 0.5) / 7).parts["model"]
    for rank in range(7):
        if rank != 5:
            (path / shard_name("model", rank)).unlink()

    assert left["wide"].read_slice((5, 0), (1, 5)).tolist() == [
        slices.whole["model"]["wide"][5].tolist()
    ]


def test_a_rank_reads_no_slice_from_slices_that_overlap(store, slices):
    """What none of them holds would be memory that was never written."""

    def wrong(rank):
        return {"model": {"w": TensorSlice(torch.ones(2, 2), (4, 2), (rank, 0))}, f"rank{rank}": {}}

    left = read_checkpoint(
        slices.save(store, 2, parts_of=wrong), ["model"], leaving=["model"]
    ).parts["model"]["w"]

    for offset, rows, problem in ((0, 4, "overlap"), (1, 3, "overlap"), (2, 2, "in no file")):
        with pytest.raises(CheckpointError, match=problem):
            left.read_slice((offset, 0), (rows, 2))
