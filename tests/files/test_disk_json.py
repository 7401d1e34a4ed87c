"""JSON of bounded size: strict both ways, and never more than it may be."""

from __future__ import annotations

import pytest

from eventloop.files import disk
from eventloop.files.disk import CorruptFileError, from_json, to_json


def test_what_is_written_is_ascii():
    """It can be printed on any terminal, escapes and all."""
    data = to_json({"a": "\x1b[31mü\n\ud800"})

    assert data.isascii()
    assert b"\x1b" not in data
    assert from_json(data) == {"a": "\x1b[31mü\n\ud800"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "isn't JSON"),
        (b"{", "isn't JSON"),
        (b"\x80\x04K\x01.", "isn't JSON"),
        (b"NaN", "NaN isn't JSON"),
        (b"[-Infinity]", "isn't JSON"),
        ('"ü"'.encode(), "isn't JSON"),
        (b"9" * 5000, "isn't JSON"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deeply"),
    ],
)
def test_what_is_not_it_is_damage(data, reason):
    """No other exception leaves it, whatever a file holds."""
    with pytest.raises(CorruptFileError, match=reason):
        from_json(data)


def test_nan_is_not_written():
    """Standard readers couldn't read the file; a nest has a way to say it."""
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json(float("nan"))


@pytest.mark.parametrize("value", [[0] * 600_000, [[]] * 600_000, "a" * (33 * 2**20)])
def test_size_is_limited_both_ways(value, monkeypatch):
    """Nothing is written that wouldn't be read."""
    with pytest.raises(CorruptFileError, match="are allowed"):
        to_json(value)

    monkeypatch.setattr(disk, "_check_json_size", lambda data, max_items: None)
    data = to_json(value)
    monkeypatch.undo()
    with pytest.raises(CorruptFileError, match="are allowed"):
        from_json(data)
