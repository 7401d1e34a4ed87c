"""Positions in training data: each is that of one kind of source, or refused."""

from __future__ import annotations

import pytest

from eventloop.data.positions import check_position
from eventloop.forms import FormError

OBJECTS = {"contents": {}, "values": {}, "gone": [], "lost": {}}
SAMPLING = {"objects": {"sampler": {"kind": "RandomSampler", **OBJECTS}}, "stateful": {}}
PASSES = {"seeds_once": False, "has_begun": True}
MAP_STYLE = {
    "order": {"kind": "shuffled", "ranks": 1, "seed": 0},
    "world_size": 1,
    "batch_size": 4,
    "global_batch_size": 4,
    "num_samples": 12,
    "start": SAMPLING,
    "check": 7,
    "now": SAMPLING,
    "passes": PASSES,
    "data": OBJECTS,
}
ITERABLE = {"num_workers": 0, "start": None, "now": SAMPLING, "passes": PASSES}
STATEFUL = {"dataloader": {"any": "thing"}, "is_exhausted": False}
CYCLED = {"pass_idx": 1, "num_in_pass": 2, "repeated": MAP_STYLE}
ZIPPED = {"parts": {"images": CYCLED, "texts": STATEFUL, "list": {}}}


@pytest.mark.parametrize("position", [{}, MAP_STYLE, ITERABLE, STATEFUL, CYCLED, ZIPPED])
def test_each_kind_has_a_position(position):
    """The negative control."""
    check_position(position, "p")


@pytest.mark.parametrize(
    ("position", "says"),
    [
        (None, "p is None, not values by name"),
        ({"unknown": 1}, "p is the position of no kind of data, with unknown"),
        (MAP_STYLE | {"dataloader": None}, "p is the position of no kind of data, with order"),
        (MAP_STYLE | {"num_samples": -1}, "p.num_samples is -1, not between 0"),
        (MAP_STYLE | {"passes": {}}, "p.passes has no 'seeds_once'"),
        (MAP_STYLE | {"order": {"kind": "shuffled"}}, "p.order has no 'ranks'"),
        (MAP_STYLE | {"now": {"objects": {}}}, "p.now has no 'stateful'"),
        (ITERABLE | {"num_workers": 1.5}, "p.num_workers is 1.5, not an int"),
        (STATEFUL | {"is_exhausted": 1}, "p.is_exhausted is 1, not a bool"),
        (CYCLED | {"repeated": {"parts": 1}}, "p.repeated.parts is 1, not values by name"),
        ({"parts": {"a": CYCLED | {"pass_idx": -2}}}, "p.parts.a.pass_idx is -2, not between -1"),
    ],
)
def test_a_position_of_no_source_is_refused(position, says):
    """Keys of two kinds, values out of range, and all of it within combined loaders."""
    with pytest.raises(FormError) as caught:
        check_position(position, "p")

    assert str(caught.value).startswith(says)
