"""Logged texts and tables: what is shown of them, on a terminal, in a file and in a notebook."""

import html
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eventloop import hookimpl
from eventloop_progress import Progress
from eventloop_progress.logged_texts import MOST_CHARS, MOST_ROWS, html_of, lines_of
from eventloop_progress.notebook import MOST_TEXTS, Notebook
from eventloop_testing import isolated_trainer

any_text = st.text(st.characters(exclude_categories=()))
cells = st.one_of(any_text, st.floats(), st.integers(), st.none())
tables = st.dictionaries(any_text, st.lists(cells, max_size=3), max_size=3)


class Says:
    """A callback that logs a text and a table in each evaluation."""

    name = "says"

    @hookimpl
    def eval_end(self, state):
        state.log_text("said", "first\n\x1b[31mred")
        state.log_text("samples", {"prompt": ["1+1=", "a\nb"], "score": [0.5, None]})


SHOWN = ["test/said", "  first", "  \\x1b[31mred", "test/samples", "  prompt: 1+1=  score: 0.5000",
         "  prompt: a\\nb  score: "]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_texts_are_shown_as_lines(terminal, tmp_path):
    """Above the bar, or among the lines of a file; what a model says can't colour a terminal."""
    progress = Progress()
    progress.console = Console(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system=None
    )
    with isolated_trainer(tmp_path, callbacks=[progress, Says()], max_duration="2ep") as trainer:
        trainer.fit()

    text = progress.console.file.getvalue()
    lines = [
        re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split("[\r\n]+", text)
    ]
    assert "\x1b[31m" not in text
    for line in SHOWN:
        assert lines.count(line.rstrip()) == 2


@given(any_text, st.one_of(any_text, tables))
def test_whatever_is_said_is_a_few_lines(name, text):
    """Each without a control character, and none much longer than a screen is wide."""
    if isinstance(text, dict):
        shortest = min(map(len, text.values()), default=0)
        text = {column: found[:shortest] for column, found in text.items()}

    lines = list(lines_of(name, text))

    assert len(lines) <= MOST_ROWS + 2
    assert not any(set(line) & {"\x1b", "\n", "\r", "\0"} for line in lines)
    assert set(re.findall("<[^ >]*", html_of(name, text))) <= {
        "<div", "</div", "<b", "</b", "<table", "</table", "<thead", "</thead", "<tbody", "</tbody",
        "<tr", "</tr", "<th", "</th", "<td", "</td", "<small", "</small",
    }  # fmt: skip


def test_of_long_ones_the_beginning_is_shown():
    """A text may have megabytes."""
    long = list(lines_of("said", "\n".join(["x" * 1_000_000] * 50)))
    table = list(lines_of("samples", {"a": [str(one) for one in range(1_000)]}))

    assert [len(line) < MOST_CHARS + 50 for line in long] == [True] * (MOST_ROWS + 2)
    assert (long[-1], table[-1]) == ("  ... 42 more lines", "  ... 992 more rows")
    assert len(html_of("samples", {"a": ["x" * 1_000_000] * 50})) < 10_000


def test_a_notebook_has_the_latest_of_each_name():
    """In the one output of the cell, as a table above the bar."""
    outputs = []

    def show(text):
        outputs.append(text)
        return outputs.append

    notebook = Notebook(show)
    for batch in (1, 2):
        notebook.text("<samples>", {"at": [batch], "said": ["<b>"]})
    for idx in range(MOST_TEXTS - 1):
        notebook.text(f"more {idx}", "text")

    last = outputs[-1]
    assert html.escape("<samples>") in last
    assert "&lt;b&gt;" in last
    assert re.findall(r"<td[^>]*>(\d)</td>", last) == ["2"]
    notebook.text("one more", "text")
    assert "samples" not in outputs[-1]
