"""Forms: what a checkpoint holds is checked by the types of the dataclasses that write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from eventloop.checkpoint.best import BestState
from eventloop.clock import ClockState
from eventloop.forms import (
    INT,
    FormError,
    NonNegativeInt,
    as_dict,
    by_name,
    each,
    form_of,
    from_dict,
    is_a,
    meets,
    optional,
)
from eventloop.training.grad_scaling import ScaledState

CLOCK = form_of(ClockState)
BEST = form_of(BestState)
NOW = [1, 8, 32, 0, 0.5]
STATE = {"now": NOW, "previous": NOW, "epoch_start": NOW}


@pytest.mark.parametrize(
    ("value", "form", "says"),
    [
        (STATE | {"now": [1, -5, 32, 0, 0.5]}, CLOCK, "c.now[1] is -5, not between 0"),
        (STATE | {"now": [1, 2**62, 32, 0, 0.5]}, CLOCK, "c.now[1] is 4611686018427387904"),
        (STATE | {"now": [True, 8, 32, 0, 0.5]}, CLOCK, "c.now[0] is True, not an int"),
        (STATE | {"now": [1, 8, 32, 0, float("nan")]}, CLOCK, "c.now[4] is nan"),
        (STATE | {"now": NOW[:4]}, CLOCK, "c.now has 4 entries, not 5"),
        ({"now": NOW, "previous": NOW}, CLOCK, "c has no 'epoch_start'"),
        (None, CLOCK, "c is None, not values by name"),
        ({"metric": "max eval/accuracy"}, optional(BEST, {}), "c has no 'value'"),
        ({"scaler": {}, "num_skipped": 0}, form_of(ScaledState), "c.scaler has no 'scale'"),
        ([torch.ones(2), "x"], each(is_a(Tensor)), "c[1] is 'x', not a Tensor"),
        ({"a": 1, 2: 3}, by_name(INT), "a key of c is 2, not a str"),
    ],
)
def test_the_message_has_the_path_and_the_value(value, form, says):
    """A name in a nest of thousands of values is worth more than a KeyError."""
    with pytest.raises(FormError) as caught:
        form(value, "c")

    assert str(caught.value).startswith(says)


def test_what_a_run_writes_has_its_form():
    """The negative control."""
    CLOCK(STATE, "c")
    optional(BEST, {})({}, "c")
    CLOCK({**STATE, "of a later version": 1}, "c")


@dataclass(frozen=True)
class Inner:
    count: NonNegativeInt
    weights: Tensor | None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None
    rows: list[dict[str, float]]
    even: Annotated[int, meets(lambda number: number % 2 == 0, INT, "an even number")]
    anything: Any = None


def outer(**changes):
    values = {"name": "a", "inner": Inner(3, torch.ones(2)), "rows": [{"loss": 0.5}], "even": 4}
    return Outer(**values | changes)


def test_a_dataclass_is_read_as_it_was_written():
    """Nested ones, too; tensors are the same objects, not copies."""
    state = outer()

    saved = as_dict(state)

    assert saved["inner"] == {"count": 3, "weights": state.inner.weights}
    assert from_dict(Outer, saved) == state
    assert from_dict(Outer, saved).inner.weights is state.inner.weights
    assert from_dict(Outer, as_dict(outer(inner=None))).inner is None


def test_keys_of_a_later_version_are_ignored_and_fields_with_a_default_may_be_absent():
    """Both happen when a package is updated in the middle of a run."""
    saved = as_dict(outer()) | {"of a later version": 1}
    del saved["anything"]

    assert from_dict(Outer, saved).anything is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": 1}, "Outer.name is 1, not a str"),
        ({"inner": {"count": -1, "weights": None}}, "Outer.inner.count is -1, not between 0"),
        ({"inner": {"count": True, "weights": None}}, "Outer.inner.count is True, not an int"),
        ({"inner": {"count": 1, "weights": [1.0]}}, "Outer.inner.weights is a list of 1"),
        ({"inner": {"count": 1}}, "Outer.inner has no 'weights'"),
        ({"inner": 3}, "Outer.inner is 3, not values by name"),
        ({"rows": [{"loss": "x"}]}, "Outer.rows[0].loss is 'x', not a float"),
        ({"rows": {"loss": 1.0}}, "Outer.rows is a dict of 1, not a list"),
        ({"even": 3}, "Outer.even is 3, not an even number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_path(changes, says):
    """Nothing is built of a file that no run has written."""
    with pytest.raises(FormError) as caught:
        from_dict(Outer, as_dict(outer()) | changes)

    assert str(caught.value).startswith(says)


def test_a_missing_field_is_named():
    """A dataclass would raise a TypeError about its constructor."""
    saved = as_dict(outer())
    del saved["rows"]

    with pytest.raises(FormError, match="Outer has no 'rows'"):
        from_dict(Outer, saved)
