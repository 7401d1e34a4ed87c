"""Logged texts and tables on the page."""

import re

import pytest

from eventloop import hookimpl
from eventloop_report import Page, Report
from eventloop_report.texts import MAX_CHARS, MAX_ROWS, MAX_TEXTS, Texts
from eventloop_testing import edited_checkpoint, isolated_trainer

NAMES = ("early", "test/samples")


class Says:
    """An algorithm that logs texts early and late, and fails after a batch."""

    name = "says"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch < 3:
            state.log_text("early", f"<b>{state.clock.batch}</b>\nsecond line")
        if state.clock.batch == self.batch:
            raise EOFError

    @hookimpl
    def eval_end(self, state):
        state.log_text("samples", {"at": [state.clock.batch], "said": ["\x1b[31m"], "no": [None]})


def sections(folder, batch=-1):
    """Trains 6 batches; returns what the page has under the names of the texts."""
    given = {"checkpoint_interval": "1ba", "max_duration": "2ep", "eval_interval": "1ep"}
    with isolated_trainer(
        folder, algorithms=[Says(batch)], callbacks=[Report(pngs=False)], **given
    ) as trainer:
        trainer.fit()
    page = (folder / "run" / "report.html").read_text()
    parts = {name: re.search(f"<h2>{name}</h2>(.*?)</p>", page, re.S) for name in NAMES}
    return {name: part[1] for name, part in parts.items() if part}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the page of a run in one go has."""
    return sections(tmp_path_factory.mktemp("whole"))


def test_the_page_has_the_latest_of_each_name(whole):
    """With the batch after which it was logged; whatever a model says is text."""
    found = whole

    assert "<td>&lt;b&gt;2&lt;/b&gt;</td></tr>\n<tr><td>second line</td>" in found["early"]
    assert "Logged after batch 2." in found["early"]
    assert '<td class="number">6</td><td>\\x1b[31m</td><td></td>' in found["test/samples"]


@pytest.mark.nightly
def test_a_resumed_run_has_the_texts_of_one_in_one_go(tmp_path, whole):
    """Those before the checkpoint come from it."""
    with pytest.raises(EOFError):
        sections(tmp_path, batch=5)

    assert sections(tmp_path) == whole


@pytest.mark.nightly
def test_a_run_goes_on_from_a_checkpoint_without_texts(tmp_path):
    """Older ones have none."""
    with pytest.raises(EOFError):
        sections(tmp_path, batch=5)
    with edited_checkpoint(tmp_path) as checkpoint:
        del checkpoint.parts["plugins"]["report"]["state"]["texts"]

    assert [*sections(tmp_path)] == ["test/samples"]


@pytest.mark.nightly
def test_long_ones_are_cut_and_of_many_the_latest_stay():
    """They are in memory, in each checkpoint and on the page."""
    texts = Texts()
    for idx in range(MAX_TEXTS + 5):
        texts.add(
            f"name {idx}",
            idx,
            {"\ud800": ["x" * 1_000_000] * (MAX_ROWS + 7), "n": [1] * (MAX_ROWS + 7)},
        )
    texts.add("name 5", 99, "\n".join("abc"))

    tables = list(texts.tables())

    assert [one.title for one in tables] == [
        *(f"name {idx}" for idx in range(6, MAX_TEXTS + 5)),
        "name 5",
    ]
    assert len(tables[0].rows) == MAX_ROWS
    assert len(tables[0].rows[0][0]) < MAX_CHARS + 50
    assert "7 more rows aren't shown" in tables[0].note
    assert Page("run", "done", tables=tables).html().encode()
    again = Texts()
    again.load_state_dict(texts.state_dict())
    assert list(again.tables()) == tables
