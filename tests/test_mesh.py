"""Layouts: which ranks share their samples, and what they are called."""

from __future__ import annotations

import pytest

from eventloop import SettingError
from eventloop.mesh import Layout

EIGHT = Layout({"data": 8})


def test_ranks_that_follow_each_other_share_their_samples():
    layout = EIGHT.sharing("tp", 2)

    assert layout.sizes == {"data": 4, "tp": 2}
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (layout.world_size, layout.data_world_size) == (8, 4)
    assert layout.peers() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_samples_are_counted_over_several_dimensions():
    layout = Layout({"replicate": 2, "shard": 2, "tp": 2}, data=("replicate", "shard"))

    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.position(5) == {"replicate": 1, "shard": 0, "tp": 1}


def test_parts_of_the_model_are_told_from_shards_of_it():
    layout = EIGHT.sharing("stage", 2, holds_parts=True).sharing("tp", 2)

    assert [layout.part(rank) for rank in (0, 1, 2)] == [
        (("stage", 0),),
        (("stage", 0),),
        (("stage", 1),),
    ]


@pytest.mark.parametrize("size", [0, 3, 16])
def test_a_dimension_that_doesnt_divide_the_ranks_is_refused(size):
    with pytest.raises(SettingError, match="'data' has 8 ranks, which can't be divided by"):
        EIGHT.sharing("tp", size)


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (EIGHT, EIGHT, [*range(8)]),
        (EIGHT.sharing("tp", 2), EIGHT, [0, 2, 4, 6, None, None, None, None]),
        (EIGHT, EIGHT.sharing("tp", 2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (EIGHT.sharing("tp", 8), Layout({"data": 1}), [0]),
    ],
)
def test_a_rank_goes_on_from_the_one_that_had_its_samples(then, now, expected):
    assert [then.twin(now, rank) for rank in range(now.world_size)] == expected


def test_a_rank_is_called_by_its_number_and_by_its_position_if_it_has_one():
    assert EIGHT.label(3) == "3"
    assert EIGHT.sharing("tp", 2).label(3) == "3 (data 1, tp 1)"
    assert str(EIGHT) == "8 ranks"
    assert str(EIGHT.sharing("tp", 2)) == "8 ranks (data 4 x tp 2)"
