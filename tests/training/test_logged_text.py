"""Texts and tables that are logged: whose they are, when they come, and what they may be."""

from __future__ import annotations

import math

import pytest
import torch

from eventloop import Trainer, hookimpl
from eventloop_testing import run_ranks

TABLE = {"prompt": ["one", "two"], "score": [0.5, None]}


class Records:
    """Keeps what loggers are called with, in order."""

    def __init__(self):
        self.rows = []

    @hookimpl
    def log(self, numbers, at):
        self.rows += [(at.batch, name) for name in numbers if name.startswith("n/")]

    @hookimpl
    def log_text(self, texts, at):
        self.rows += [(at.batch, name, text) for name, text in texts.items()]


@pytest.fixture
def texts_of(make_trainer, make_plugin):
    """Trains with a plugin that logs; returns what a logger was called with."""

    def texts_of(task=None, *, records=None, **hooks):
        settings = {
            name: hooks.pop(name)
            for name in [*hooks]
            if name in ("log_interval", "microbatch_size")
        }
        records = records or Records()
        make_trainer(task, callbacks=[make_plugin("writer", **hooks), records], **settings).fit()
        return records.rows

    return texts_of


@pytest.mark.parametrize("interval", ["1ba", "2ba", "100ba"])
def test_texts_come_in_order_with_their_moment(interval, texts_of):
    """Whatever the interval: each once, behind the numbers of the same batch."""

    def after_loss(state):
        state.log("n/loss", state.loss)
        if state.clock.batch % 2:
            state.log_text("said", f"before batch {state.clock.batch + 1} was done")

    found = texts_of(after_loss=after_loss, log_interval=interval)

    assert found == [
        (1, "n/loss"),
        (2, "n/loss"),
        (2, "said", "before batch 2 was done"),
        (3, "n/loss"),
    ]


def test_a_table_is_a_copy_and_a_later_text_replaces_one(texts_of):
    """What its caller appends to it later belongs to a later moment; so it is with numbers."""
    columns = {"prompt": [], "score": []}

    def batch_end(state):
        state.log_text("samples", "nothing yet")
        for name, cells in TABLE.items():
            columns[name].append(cells[state.clock.batch % 2])
        state.log_text("samples", columns)

    *_, second, third = texts_of(batch_end=batch_end)

    assert second[:2] == (2, "samples")
    assert second[2] == {"prompt": ["two", "one"], "score": [None, 0.5]}
    assert third[2] == {"prompt": ["two", "one", "two"], "score": [None, 0.5, None]}


def test_microbatches_and_a_closure_leave_one_text(texts_of):
    """A number of microbatches is their mean; of texts the last one stays."""

    def after_forward(state):
        state.log_text("said", f"part {state.microbatch_idx}")

    found = texts_of(after_forward=after_forward, microbatch_size=2)

    assert [one[:2] for one in found] == [(1, "said"), (2, "said"), (3, "said")]
    assert {text for _, _, text in found} == {"part 1"}


def test_a_text_of_an_eval_set_has_its_name(make_task, make_batches, texts_of):
    """Two sets would replace each other's; the moment is that of the evaluation."""
    sets = {"valid": make_batches(), "train": make_batches()}

    found = texts_of(
        make_task(eval_dataloaders=sets),
        eval_end=lambda state: state.log_text("samples", state.eval_name),
        eval_after_all=lambda state: state.log_text("samples", "all"),
    )

    assert found == [
        (3, "valid/samples", "valid"),
        (3, "eval/train/samples", "train"),
        (3, "samples", "all"),
    ]


def test_an_evaluation_without_a_fit_hands_its_texts_on(
    make_trainer, make_task, make_batches, make_plugin
):
    """`eventloop eval` has the same loggers; a prediction has no moment of a training."""
    task, records = make_task(eval_dataloaders={"test": make_batches()}), Records()
    writer = make_plugin(
        "writer",
        eval_end=lambda state: state.log_text("samples", "said"),
        predict_end=lambda state: state.log_text("samples", "dropped"),
    )
    trainer = make_trainer(task, callbacks=[writer, records])

    trainer.eval()
    trainer.predict(make_batches())
    trainer.eval()

    assert records.rows == [(0, "test/samples", "said")] * 2


def test_a_batch_that_failed_leaves_no_text(make_trainer, make_plugin):
    """It would stand at the batch before; what came earlier is handed on while it fails."""
    records = Records()

    def before_backward(state):
        state.log_text("said", str(state.clock.batch))
        assert state.clock.batch < 1, "on purpose"

    writer = make_plugin("writer", before_backward=before_backward)

    with pytest.raises(AssertionError, match="on purpose"):
        make_trainer(callbacks=[writer, records], log_interval="100ba").fit()

    assert records.rows == [(1, "said", "0")]


def test_without_a_logger_of_texts_nothing_is_kept(make_trainer, make_plugin):
    """A long run that generates must not fill the memory."""
    writer = make_plugin("writer", batch_end=lambda state: state.log_text("said", "x"))
    trainer = make_trainer(callbacks=[writer])

    trainer.fit()

    assert not trainer.state._numbers._texts
    assert not trainer.state._numbers._rows


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        (3.0, TypeError, r"log_text\('said', ...\) takes a text, or columns of .* not float$"),
        (["a"], TypeError, "not list"),
        ({"a": ["x"], "b": []}, ValueError, r"different lengths: {'a': 1, 'b': 0}"),
        ({"a": [torch.ones(())]}, TypeError, "not Tensor in column 'a'"),
        ({"a": [["x"]]}, TypeError, "not list in column 'a'"),
        ({"a": "text"}, TypeError, "not str as column 'a'"),
        ({"a": 3}, TypeError, "not int as column 'a'"),
    ],
)
def test_only_texts_and_tables_can_be_logged(text, kind, shown, make_trainer):
    """Found where it is logged, and on every rank, not in a logger a hundred batches later."""
    state = make_trainer().state

    with pytest.raises(kind, match=shown):
        state.log_text("said", text)


@pytest.mark.parametrize("name", [{"a": ["x"]}, 3, ""])
def test_a_text_has_a_name(name, make_trainer):
    """Arguments in the wrong order were a name that a logger met, or none did."""
    with pytest.raises(
        TypeError, match=r"log_text takes a name first, then a text or a table, not"
    ):
        make_trainer().state.log_text(name, "said")


@pytest.mark.parametrize(
    "text", ["", "\x1b[31m\0\ud800", "long " * 100_000, {}, {"a": []}, {"a": [math.nan, True]}]
)
def test_any_text_and_any_table_is_taken(text, texts_of):
    """What is safe to show is up to what shows it."""
    found = texts_of(batch_end=lambda state: state.log_text("said", text))

    assert [str(one[2]) for one in found] == [str(text)] * 3


class Writes:
    """Logs a text on each rank, and on rank 0 what all ranks have."""

    @hookimpl
    def batch_end(self, state):
        state.log("train/loss", 1.0, "mean")
        state.log_text("train/loss", f"of rank {state.rank}")  # as numbers that are reduced
        state.log_text("all", {"said": state.all_gather(f"rank {state.rank}")})


def test_of_several_ranks_the_texts_of_rank_0_are_kept(make_task):
    """Those of the others come with `all_gather`; numbers of the same name are still reduced."""

    def train():
        records = Records()
        with Trainer(
            make_task(),
            callbacks=[Writes(), records],
            max_duration="2ba",
            autoload=False,
            device="cpu",
        ) as trainer:
            trainer.fit()
        return records.rows

    first, second = run_ranks(train)

    both = {"said": ["rank 0", "rank 1"]}
    assert first == [
        (batch, *one) for batch in (1, 2) for one in (("train/loss", "of rank 0"), ("all", both))
    ]
    assert second == []
