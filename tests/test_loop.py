"""The order of events: design and loop say the same, however a run goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from eventloop.events import EVENTS

NUM_BATCHES, NUM_MICROBATCHES = 3, 2
EVAL_SETS = {"valid": 2, "test": 1}

# What follows is the pseudo-code of the documentation, as far as it tells of events.
BUILT = ["init", "after_load"]
Tell = Iterator[str]


def run(num_epochs: int) -> Tell:
    yield from ("training_start", "fit_start")
    for _ in range(num_epochs):
        yield from epoch()
    yield from ("fit_end", "training_end")


def epoch(num_batches: int = NUM_BATCHES, evaluated: bool = True) -> Tell:
    yield "epoch_start"
    for _ in range(num_batches):
        yield from batch()
        yield "batch_checkpoint"
    yield "epoch_end"
    if evaluated:
        yield from evaluation()
    yield "epoch_checkpoint"


def batch() -> Tell:
    yield from ("before_dataloader", "after_dataloader", "batch_start")
    yield "before_train_batch"
    for _ in range(NUM_MICROBATCHES):
        yield from ("before_forward", "after_forward")
        yield from ("before_loss", "after_loss")
        yield from ("before_backward", "after_backward")
    yield "after_train_batch"
    yield "batch_end"


def evaluation() -> Tell:
    yield "eval_before_all"
    for num_batches in EVAL_SETS.values():
        yield "eval_start"
        for _ in range(num_batches):
            yield from ("eval_batch_start", "eval_before_forward", "eval_after_forward")
            yield "eval_batch_end"
        yield "eval_end"
    yield "eval_after_all"


def prediction(num_batches: int) -> Tell:
    yield "predict_start"
    for _ in range(num_batches):
        yield from ("predict_batch_start", "predict_before_forward", "predict_after_forward")
        yield "predict_batch_end"
    yield "predict_end"


@pytest.fixture
def recorder(make_recorder):
    """Records every event but `log`, which fires when numbers have arrived."""
    return make_recorder([event for event in EVENTS if event != "log"])


@pytest.fixture
def recorded(recorder, make_trainer, make_task, make_batches) -> Callable:
    """Builds a trainer with the recorder: 3 batches, 2 microbatches, 2 eval sets."""

    def recorded(role: str = "callbacks", **given):
        task = make_task(
            train_dataloader=make_batches(NUM_BATCHES, batch_size=4),
            eval_dataloaders={name: make_batches(count) for name, count in EVAL_SETS.items()},
        )
        plugins = {"algorithms": list(given.pop("algorithms", ())), "callbacks": []}
        plugins[role].append(recorder)
        return make_trainer(task, **plugins, **{"microbatch_size": 2, "max_duration": "2ep"}
                            | given)  # fmt: skip

    return recorded


@pytest.mark.parametrize("role", ["algorithms", "callbacks"])
def test_events_fire_in_the_order_of_the_design(role, recorded, recorder):
    """Plugins are written against that order."""
    with recorded(role) as trainer:
        trainer.fit()

    assert recorder.seen == [*BUILT, *run(num_epochs=2), "close"]


def test_a_stop_in_mid_epoch_ends_epoch_fit_and_training(recorded, recorder, make_plugin):
    """Every opener has its closer, but an epoch that was left isn't evaluated."""
    stopper = make_plugin(
        batch_end=lambda state: state.request_stop("enough") if state.clock.batch == 5 else None
    )
    trainer = recorded(algorithms=[stopper])

    trainer.fit()

    assert recorder.seen == [*BUILT, "training_start", "fit_start", *epoch(),
                             *epoch(2, evaluated=False), "fit_end", "training_end"]  # fmt: skip
    assert (trainer.state.stop_reason, trainer.state.clock.epoch) == ("enough", 1)


def test_a_stop_after_the_last_batch_completes_the_epoch(recorded, recorder, make_plugin):
    """Nothing of it is left, so that the next fit begins another."""
    trainer = recorded(algorithms=[make_plugin(should_stop=lambda state: state.clock.batch == 3)])

    trainer.fit()

    assert recorder.seen == [*BUILT, *run(num_epochs=1)]
    assert trainer.state.clock.epoch == 1


def test_an_exception_is_told_and_nothing_is_closed_that_did_not_end(
    recorded, recorder, make_plugin
):
    """What must be undone belongs in a wrapper; an event that ends something would be a lie."""

    def fail(state):
        if state.clock.batch == 4:
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"), recorded(
        algorithms=[make_plugin(before_loss=fail)]
    ) as trainer:  # fmt: skip
        trainer.fit()

    second = list(epoch(2))
    assert recorder.seen == [
        *BUILT,
        "training_start",
        "fit_start",
        *epoch(),
        *second[: second.index("after_forward", second.index("batch_end")) + 1],
        "exception",
        "close",
    ]


def test_a_second_fit_goes_on_within_one_training(recorded, recorder):
    """`training_start` opens the whole duration, `fit_start` each call."""
    trainer = recorded()

    trainer.fit(until="1ep")
    trainer.fit()

    assert recorder.seen == [*BUILT, "training_start", "fit_start", *epoch(), "fit_end",
                             "fit_start", *epoch(), "fit_end", "training_end"]  # fmt: skip


def test_a_fit_beyond_the_duration_is_a_training_of_its_own(recorded, recorder):
    """`fit(until="3ep")` after two of two epochs extends the run."""
    trainer = recorded()

    trainer.fit()
    trainer.fit(until="3ep")

    assert recorder.seen == [*BUILT, *run(num_epochs=2), *run(num_epochs=1)]


def test_a_fit_that_goes_on_in_mid_epoch_starts_the_epoch_again(recorded, recorder):
    """`epoch_start` and `epoch_end` are pairs, also for a plugin that came in the middle."""
    trainer = recorded(eval_interval=None)

    trainer.fit(until="4ba")
    trainer.fit()

    assert recorder.seen == [*BUILT, "training_start", "fit_start", *epoch(evaluated=False),
                             *epoch(1, evaluated=False), "fit_end", "fit_start",
                             *epoch(2, evaluated=False), "fit_end", "training_end"]  # fmt: skip


def test_evaluation_at_a_batch_comes_before_its_checkpoint(recorded, recorder):
    """A saver of the best model sees the results that belong to these weights."""
    recorded(eval_interval="2ba", max_duration="2ba").fit()

    assert recorder.seen == [*BUILT, "training_start", "fit_start", "epoch_start",
                             *batch(), "batch_checkpoint",
                             *batch(), *evaluation(), "batch_checkpoint",
                             "epoch_end", "epoch_checkpoint",
                             "fit_end", "training_end"]  # fmt: skip


def test_eval_and_predict_have_their_events_alone(recorded, recorder, make_batches):
    """Nothing trains there, so nothing says so."""
    trainer = recorded()

    trainer.eval()
    trainer.predict(make_batches(2))

    assert recorder.seen == [*BUILT, *evaluation(), *prediction(num_batches=2)]


def test_a_missing_event_would_be_seen(recorded, recorder):
    """Control: the comparison of the tests above isn't blind."""
    recorded(microbatch_size=4).fit()

    assert recorder.seen != [*BUILT, *run(num_epochs=2)]


def test_questions_are_asked_at_their_moments(make_trainer, make_recorder, make_batches, make_task):
    """Whoever answers one knows what has happened and what has not."""
    hooks = ("batch_start", "should_skip_batch", "after_train_batch", "should_skip_step",
             "batch_end", "should_eval", "batch_checkpoint", "should_checkpoint",
             "should_end_epoch", "should_stop", "epoch_end", "epoch_checkpoint",
             "should_rebuild_dataloader", "epoch_start")  # fmt: skip
    recorder = make_recorder(hooks)

    make_trainer(
        make_task(train_dataloader=make_batches(1)), algorithms=[recorder], max_duration="2ep"
    ).fit()

    a_batch = ["batch_start", "should_skip_batch", "after_train_batch", "should_skip_step",
               "batch_end", "should_eval", "batch_checkpoint", "should_checkpoint",
               "should_end_epoch", "should_stop"]  # fmt: skip
    an_end = ["epoch_end", "should_eval", "epoch_checkpoint", "should_checkpoint", "should_stop"]
    assert recorder.seen == ["should_checkpoint",
                             "epoch_start", *a_batch, *an_end, "should_rebuild_dataloader",
                             "epoch_start", *a_batch, *an_end, "should_checkpoint"]  # fmt: skip


def test_the_clock_advances_before_the_end_of_a_batch_and_of_an_epoch(make_trainer, make_plugin):
    """`every` and savers count what is done."""
    seen = []

    def note(name):
        return lambda state: seen.append(
            (name, state.clock.epoch, state.clock.batch, state.clock.batch_in_epoch)
        )

    hooks = ("epoch_start", "before_dataloader", "after_train_batch", "batch_end", "epoch_end")
    make_trainer(algorithms=[make_plugin(**{hook: note(hook) for hook in hooks})]).fit("1ba")
    make_trainer(algorithms=[make_plugin(epoch_end=note("whole epoch_end"))]).fit()

    assert seen == [("epoch_start", 0, 0, 0), ("before_dataloader", 0, 0, 0),
                    ("after_train_batch", 0, 0, 0), ("batch_end", 0, 1, 1), ("epoch_end", 0, 1, 1),
                    ("whole epoch_end", 1, 3, 0)]  # fmt: skip
