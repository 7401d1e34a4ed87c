"""Encodes Composer's values for an eventloop checkpoint, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from composer.core import Time, Timestamp

# Keys that mark encoded objects of Composer in a nest.
_TIME = "composer.Time"
_TIMESTAMP = "composer.Timestamp"
_DELTA = "timedelta"
_COUNTED = (
    "iteration",
    "epoch",
    "batch",
    "sample",
    "token",
    "epoch_in_iteration",
    "token_in_iteration",
    "batch_in_epoch",
    "sample_in_epoch",
    "token_in_epoch",
)


def encoded(value: Any) -> Any:
    """Encodes a nest for a checkpoint; Composer's times become marked mappings."""
    if isinstance(value, Time):
        return {_TIME: value.to_timestring()}
    if isinstance(value, Timestamp):
        return {_TIMESTAMP: encoded(_numbers(value))}
    if isinstance(value, timedelta):
        return {_DELTA: [value.days, value.seconds, value.microseconds]}
    if isinstance(value, Mapping):
        return {key: encoded(nested) for key, nested in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([encoded(nested) for nested in value])
    return value


def decoded(value: Any) -> Any:
    """Inverse of `encoded`."""
    if isinstance(value, Mapping):
        if value.keys() == {_TIME}:
            return Time.from_timestring(value[_TIME])
        if value.keys() == {_DELTA}:
            return timedelta(*value[_DELTA])
        if value.keys() == {_TIMESTAMP}:
            return Timestamp(**decoded(value[_TIMESTAMP]))
        return {key: decoded(nested) for key, nested in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([decoded(nested) for nested in value])
    return value


def _numbers(timestamp: Timestamp) -> dict[str, int]:
    """Returns the counts of a timestamp, without its wall-clock times."""
    return {name: getattr(timestamp, name).value for name in _COUNTED}
