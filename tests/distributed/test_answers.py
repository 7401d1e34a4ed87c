"""A question of the loop that ranks answer differently is named, before they wait for each other."""

from __future__ import annotations

import re
import time

import pytest

from eventloop import hookimpl
from eventloop.cli import main
from eventloop.distributed.answers import QUESTIONS, Answers, difference, has_answered
from eventloop.errors import TaskError
from eventloop.mesh import Layout
from eventloop_testing import isolated_trainer, run_ranks, tiny_task


class Plans:
    """The plans of a run, each of which answers what it is told."""

    def __init__(self) -> None:
        for name in QUESTIONS:
            setattr(self, name, lambda state: state.answer)


class Asked:
    """A rank whose loop asks questions.

    Attributes:
        clock: itself; `batch` is its count.
    """

    def __init__(self) -> None:
        self.plans = self.quiet = Plans()
        self.assembly = type("Assembly", (), {"implementations": dict.fromkeys(QUESTIONS, ())})
        self.answers = Answers()
        self.answers.record(self)
        self.clock, self.batch, self.answer = self, 0, False

    def ask(self, question: str, answer: bool) -> None:
        self.answer = answer
        assert getattr(self.plans, question)(self) is answer


def texts_of(*ranks: Asked) -> dict[int, str]:
    return {rank: str(asked.answers) for rank, asked in enumerate(ranks)}


def test_ranks_that_answer_alike_have_no_difference():
    """Wherever they are: one is ahead of the other."""
    ahead, behind = Asked(), Asked()
    for batch in range(200):
        ahead.batch = behind.batch = batch
        ahead.ask("should_skip_batch", batch % 3 == 0)
        ahead.ask("should_eval", batch % 5 == 0)
        if batch < 190:
            behind.ask("should_skip_batch", batch % 3 == 0)
            behind.ask("should_eval", batch % 5 == 0)

        assert difference(texts_of(ahead, behind)) is None
    assert len(str(ahead.answers)) < 1_000


def test_the_first_difference_is_named_with_its_batch_and_ranks():
    """What follows differs, too, for that reason."""
    ranks = [Asked(), Asked(), Asked()]
    for batch in range(9):
        for idx, rank in enumerate(ranks):
            rank.batch = batch
            rank.ask("should_skip_batch", False)
            rank.ask("should_eval", batch >= 7 and idx == 1)

    found = difference(texts_of(*ranks))

    assert found is not None
    assert (found.question, found.batch, found.yes, found.no) == ("should_eval", 7, (1,), (0, 2))
    assert found.text(Layout({"data": 3})) == (
        "the ranks answered should_eval differently at batch 7: True on rank 1, not on ranks 0, 2"
    )


def test_a_rank_that_has_not_been_asked_yet_differs_from_none():
    """It is slower; with the answer it is known."""
    asked, slow = Asked(), Asked()
    asked.ask("should_stop", True)

    assert difference(texts_of(asked, slow)) is None
    assert not has_answered(str(slow.answers), 0)
    slow.ask("should_stop", False)
    assert has_answered(str(slow.answers), 0)
    assert difference(texts_of(asked, slow)) is not None


def test_answers_that_are_forgotten_differ_from_none():
    """A record holds the last ones alone."""
    old, new = Asked(), Asked()
    old.ask("should_eval", True)
    for batch in range(100):
        new.batch = batch
        new.ask("should_eval", True)

    assert difference(texts_of(old, new)) is None


def test_the_digest_tells_answers_apart_by_their_place_and_their_question():
    """It travels with the counts of a batch, as a number."""
    digests = set()
    for place in range(3):
        for question in ("should_eval", "should_stop"):
            rank = Asked()
            for number in range(3):
                rank.ask(question, number == place)
            digests.add(rank.answers.digest)

    assert len(digests) == 6
    assert all(0 < digest < 2**32 for digest in digests)


@pytest.mark.parametrize(
    "text", ["", "x", "1", "1 0 5", "1 0 0:0:99", "9" * 30 + " 0", "1 0 " + "x" * 9]
)
def test_a_record_of_another_form_is_ignored(text):
    """Anyone may have written it."""
    asked = Asked()
    asked.ask("should_eval", True)

    assert difference({0: str(asked.answers), 1: text}) is None
    assert has_answered(text, 5)


ALONE = """
from eventloop import hookimpl
from eventloop_testing import tiny_task


class Alone:
    name = "alone"


def {question}(self, state):
    return state.rank == 1 and state.clock.batch == {batch}


Alone.{question} = hookimpl({question})


def task():
    made = tiny_task(algorithms=[Alone()])
    made.settings |= {{"device": "cpu", "max_duration": "60ep"}}
    return made
"""
BATCHES = {"should_rebuild_dataloader": 4}  # asked where an epoch begins


@pytest.mark.sampled(3)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_ranks_answer_differently_ends_the_run(end_ranks, clean, question):
    """It hung until the timeout of half an hour, or averaged gradients of two batches."""
    batch = BATCHES.get(question, 3)
    (clean / "alone.py").write_text(ALONE.format(question=question, batch=batch))
    start = time.time()

    ended = end_ranks(main, ["fit", "alone.py", "--no-plugins", "--run-dir", "out"])

    first = ended.err.splitlines()[0]
    assert set(ended.statuses) == {1}
    assert re.fullmatch(
        rf"rank \d: TaskError: the ranks answered {question} differently at batch {batch}: True on "
        "rank 1, not on rank 0",
        first,
    )
    assert "answered_by  alone (Task(algorithms=...))" in ended.err
    assert time.time() - start < 60


class SkipsAlone:
    """Skips a batch on rank 1."""

    name = "skips"

    @hookimpl
    def should_skip_batch(self, state) -> bool:
        """Answers for rank 1 as for no other."""
        return state.rank == 1 and state.clock.batch == 2


def fit_in_script(folder):
    """Returns what a fit raises, with its notes."""
    task = tiny_task(algorithms=[SkipsAlone()])
    with isolated_trainer(folder, task, max_duration="40ba") as trainer:
        with pytest.raises((TaskError, RuntimeError)) as caught:
            trainer.fit()
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_script_gets_an_error_that_names_it(tmp_path):
    """From the counts of a batch, or from another rank's report where its connection was lost."""
    texts = run_ranks(fit_in_script, tmp_path)

    expected = "the ranks answered should_skip_batch differently at batch 2: True on rank 1"
    assert [expected in text for text in texts] == [True, True]
