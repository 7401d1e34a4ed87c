"""Whatever a stranger's name or message holds, a terminal stays as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventloop.safe_text import one_line, plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss 0.5\n\tat batch 3\n", "loss 0.5\n\tat batch 3\n"),
        ("größer — 漢字 \u00a0", "größer — 漢字 \u00a0"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("over\rwritten\x07", "over\\rwritten\\x07"),
        ("turned \u202e dnuora", "turned \\u202e dnuora"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_control_characters_are_shown_instead_of_obeyed(text, expected):
    """Words in any script stay what they are."""
    assert plain(text) == expected


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_left_does_nothing_but_show(text):
    """All that isn't printed is the end of a line and the tab."""
    rest = "".join(char for char in plain(text) if char not in "\n\t")

    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in rest)
    assert rest.encode().decode() == rest
    assert plain(text).count("\n") == text.count("\n")


def test_the_middle_of_a_long_line_is_left_out():
    """Ten megabytes would scroll everything else away."""
    text = plain(f"begins {'x' * 10_000_000} ends\nshort")

    assert len(text) < 2_100
    assert text.startswith("begins xxx")
    assert "... (9,998,012 characters) ..." in text
    assert text.endswith("xxx ends\nshort")


def test_one_line_stays_one():
    """A name with an end of a line in it would make a row of a table of its own."""
    assert one_line("a\nb\tc\x1b") == r"a\nb\tc\x1b"
