"""Texts and tables as TensorBoard takes them."""

import warnings

import numpy as np
import pytest
from tensorboard.util.tensor_util import make_ndarray

from eventloop_tensorboard.texts import MOST_CHARS, MOST_ROWS, summary_of

with warnings.catch_warnings():  # tensorboard brings an old html5lib
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard.plugins.text.text_plugin import text_array_to_html


def shown(text):
    """Returns the HTML that TensorBoard's page has of a text."""
    (value,) = summary_of("name", text).value
    return text_array_to_html(make_ndarray(value.tensor), enable_markdown=True)


def cells(text):
    (value,) = summary_of("name", text).value
    found = make_ndarray(value.tensor)
    return np.vectorize(lambda one: one.decode())(found).tolist()


@pytest.mark.parametrize("text", ["# no heading\n* no list\n", "<script>alert(1)</script>"])
def test_what_a_model_says_is_shown_as_it_is(text):
    """It is neither Markdown nor HTML, in a text as in a table."""
    for one in (text, {text: [text, "other"]}):
        page = shown(one)

        assert "<h1>" not in page
        assert "<li>" not in page
        assert "<script>" not in page
        assert page.count("<code>") >= 1


@pytest.mark.parametrize("text", ["", "\x1b[31m\0\ud800\r\n", {}, {"a": []}, {"a": [None, 1, 0.5]}])
def test_any_text_and_any_table_is_taken(text):
    """A text that fails would end the run."""
    assert isinstance(shown(text), str)
    assert summary_of("\ud800", text).value[0].tag == "?/text_summary"


def test_long_ones_are_cut():
    """The events of the latest step are in each checkpoint; the page takes a minute for a megabyte."""
    ((text,), *_) = [cells("x" * (MOST_CHARS + 5_000))]
    table = cells({"a": [str(one) for one in range(MOST_ROWS + 7)], "b": [None] * (MOST_ROWS + 7)})

    assert text == f"    {'x' * MOST_CHARS}... (5,000 more characters)"
    assert table[0] == ["    a", "    b"]
    assert table[-2:] == [[f"    {MOST_ROWS - 1}", ""], ["    ... 7 more rows", ""]]
