"""A fit that raised and was caught: the next one does what is outstanding, once."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, hookimpl
from eventloop.plugin.declared_hooks import HOOKS
from eventloop_testing import isolated_trainer, run_ranks

# Called between the start of a batch and the end of an epoch.
WITHIN_EPOCH = ("batch", "microbatch", "epoch", "eval", "eval batch")
EVENTS_AND_QUESTIONS = [
    name
    for name, hook in HOOKS.items()
    if hook.kind in ("event", "question") and hook.per in WITHIN_EPOCH
]
ACTIONS = ["count_batch", "split_batch", "forward", "loss", "backward", "clip_gradients"]
ACTIONS_AFTER_A_STEP = ["zero_grad", "scheduler_step", "evaluate", "save_checkpoint"]
NUM_SAMPLES = 12


class Stream(IterableDataset):
    """Yields the samples in order; a fresh process couldn't seek in it."""

    def __iter__(self):
        return iter(samples())


def samples():
    inputs = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.argmax(1))


LOADERS = {
    "shuffled": lambda: DataLoader(samples(), batch_size=4, shuffle=True),
    "two workers": lambda: DataLoader(samples(), 4, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: list(DataLoader(samples(), batch_size=4)),
}


class Counting:
    """Counts the calls of the events that end a batch or an epoch."""

    def __init__(self, name):
        self.name = name
        self.calls = Counter()

    @hookimpl
    def batch_end(self, state):
        self.calls[f"batch_end {state.clock.batch}"] += 1

    @hookimpl
    def batch_checkpoint(self, state):
        self.calls[f"batch_checkpoint {state.clock.batch}"] += 1

    @hookimpl
    def epoch_end(self, state):
        self.calls[f"epoch_end {state.clock.epoch}"] += 1

    @hookimpl
    def epoch_checkpoint(self, state):
        self.calls[f"epoch_checkpoint {state.clock.epoch}"] += 1


def failing(hook, at_call, log, *, wraps="", failure=OSError):
    """Makes an algorithm that raises at one call of a hook, or around an action."""

    def count():
        log["calls"] += 1
        if log["calls"] == at_call:
            raise failure(hook)

    if wraps:

        def around(self):
            if wraps == "before":
                count()
            result = yield
            if wraps == "after":
                count()
            return result

        function = hookimpl(wrapper=True)(around)
    else:
        function = hookimpl(lambda self: count())
    return type("Failing", (), {"name": "m-fails", hook: function})()


def run(make_trainer, plugin=None, loader="shuffled", **settings):
    """Trains two epochs, again after each exception; returns everything that must be the same."""
    task = Task(
        model=lambda: nn.Linear(3, 3),
        loss=cross_entropy,
        train_dataloader=LOADERS[loader],
        eval_dataloaders={"v": LOADERS["list"]},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8),
        scheduler_interval="ba",
    )
    first, last = Counting("a-first"), Counting("z-last")
    plugins = [first, last] if plugin is None else [first, plugin, last]
    trainer = make_trainer(
        task,
        algorithms=plugins,
        max_duration="2ep",
        microbatch_size=2,
        eval_interval="2ba",
        checkpoint_interval="2ba",
        **settings,
    )
    num_raised = 0
    while True:
        try:
            result = trainer.fit()
            break
        except OSError:
            num_raised += 1
    saved = sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())
    rows = [{name: row[name] for name in row if name != "seconds"} for row in result.history]
    state = trainer.state
    same = {
        "weights": state.model.weight.tolist(),
        "rate": state.optimizers["sgd"].param_groups[0]["lr"],
        "clock": state.clock.moment()[:4],
        "history": rows,
        "first": first.calls,
        "last": last.calls,
        "saved": saved,
    }
    return same, num_raised


def num_calls(make_trainer, hook, **how):
    """Returns how often a hook is called in an ordinary run."""
    log = Counter()
    run(make_trainer, failing(hook, 0, log, **how))
    return log["calls"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", ["first", "second", "last"])
@pytest.mark.parametrize("hook", EVENTS_AND_QUESTIONS)
def test_an_event_or_question_that_raised_costs_nothing(hook, which, make_trainer):
    """No batch, evaluation, checkpoint or step of a schedule is lost, and none is made twice."""
    expected, _ = run(make_trainer)
    total = num_calls(make_trainer, hook)
    at_call = {"first": 1, "second": 2, "last": total}[which]

    actual, num_raised = run(make_trainer, failing(hook, at_call, Counter()))

    assert num_raised == (at_call <= total)
    assert actual == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wraps", ["before", "after"])
@pytest.mark.parametrize("hook", ACTIONS + ACTIONS_AFTER_A_STEP)
def test_an_action_that_raised_costs_nothing(hook, wraps, make_trainer):
    """An action before the step is repeated with its batch; what follows the step is made up for."""
    expected, _ = run(make_trainer)
    twice = hook in ("scheduler_step", "evaluate", "save_checkpoint") and wraps == "after"

    at_call = 8 if hook == "count_batch" else 2  # the first are those of `SplitCheck`
    actual, num_raised = run(make_trainer, failing(hook, at_call, Counter(), wraps=wraps))

    assert num_raised == 1
    if (
        twice
    ):  # what was done before the wrapper raised is done again: only the batches are compared
        actual, expected = ({"clock": one["clock"]} for one in (actual, expected))
    assert actual == expected


@pytest.mark.filterwarnings("ignore:the train data loader is a Stream")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("hook", ["after_dataloader", "before_loss", "batch_end", "eval_end"])
def test_every_kind_of_loader_yields_the_batch_again(hook, loader, make_trainer):
    """Also one that can't seek, whose batch is kept."""
    expected, _ = run(make_trainer, loader=loader)

    actual, num_raised = run(make_trainer, failing(hook, 3, Counter()), loader=loader)

    assert num_raised == 1
    assert actual == expected


def test_a_batch_that_raised_within_its_step_is_named(make_trainer):
    """Repeating it could count it twice; leaving it out in silence would be worse."""
    plugin = failing("optimizer_step", 2, Counter(), wraps="before")
    expected, _ = run(make_trainer)

    named = r"batch 2 \(epoch 1\) raised within one of its optimizer steps"
    with pytest.warns(UserWarning, match=named):
        actual, _ = run(make_trainer, plugin)

    assert actual["clock"] == expected["clock"]
    assert actual["last"] == expected["last"]
    assert actual["rate"] == pytest.approx(expected["rate"] / 0.8)


def test_a_batch_of_a_plugin_s_own_steps_is_named(make_trainer, make_plugin):
    """Whether a `train_batch` of a plugin's own has stepped can't be seen."""
    failures = [OSError("once")]

    def train_batch(state):
        for optimizer in state.optimizers.values():
            optimizer.step()
        if failures:
            raise failures.pop()
        return True

    with pytest.warns(UserWarning, match="batch 1 .* in train_batch of 'm-own', .* isn't repeated"):
        actual, _ = run(make_trainer, make_plugin("m-own", train_batch=train_batch))

    assert actual["clock"][1] == 6


@pytest.mark.parametrize(
    ("failing_call", "place"),
    [
        (1, "in train_batch of 'm-own', whose optimizer steps can't be observed"),
        (3, "within one of its optimizer steps or after one"),
    ],
    ids=["first update", "second update"],
)
def test_a_batch_of_two_updates_that_raised_is_named_by_what_may_have_changed(
    failing_call, place, make_trainer, make_plugin
):
    """A GAN whose first loss raises hasn't stepped, as far as the loop sees, but its plugin may have."""
    failures, calls = [OSError("once")], Counter()

    def loss(state):
        calls["loss"] += 1
        if calls["loss"] == failing_call and failures:
            raise failures.pop()
        return state.model(state.microbatch[0]).mean()

    def train_batch(state):
        state.update(loss, ["sgd"])
        return state.update(loss, ["sgd"])

    with pytest.warns(UserWarning, match=rf"batch 1 \(epoch 1\) raised {place}") as caught:
        actual, _ = run(make_trainer, make_plugin("m-own", train_batch=train_batch))

    assert len([warning for warning in caught if "isn't repeated" in str(warning.message)]) == 1
    assert actual["clock"][1] == 6
    # Of the other five batches each update has two microbatches.
    assert calls["loss"] == failing_call + 5 * 2 * 2


@pytest.mark.parametrize("event", ["training_start", "fit_start", "fit_end", "training_end"])
def test_an_event_of_the_whole_fit_that_raised_is_repeated_for_all_plugins(
    event, make_trainer, make_plugin
):
    """Unlike an event that ends a batch or an epoch, which goes on from the plugin that raised."""
    failures, calls = [OSError("once")], Counter()

    def fails():
        if failures:
            raise failures.pop()

    def counts():
        calls[event] += 1

    trainer = make_trainer(
        algorithms=[
            make_plugin("a-first", **{event: counts}),
            make_plugin("m-fails", **{event: fails}),
        ],
    )
    with pytest.raises(OSError, match="once"):
        trainer.fit()
    trainer.fit()

    assert calls[event] == 2


def test_a_batch_of_own_steps_that_were_not_reached_is_trained_on(make_trainer, make_plugin):
    """An exception before `train_batch` says nothing about the steps of the batch before."""
    failures, batches = [OSError("once")], []

    def after_dataloader(state):
        if state.clock.batch == 1 and failures:
            raise failures.pop()

    def train_batch(state):
        batches.append(state.clock.batch)
        return state.update(lambda state: state.model(state.microbatch[0]).mean(), ["sgd"])

    plugin = make_plugin("m-own", train_batch=train_batch, after_dataloader=after_dataloader)
    _, num_raised = run(make_trainer, plugin)

    assert num_raised == 1
    assert batches == [0, 1, 2, 3, 4, 5]


def test_what_counts_a_repeated_batch_twice_is_named(make_trainer, make_plugin):
    """Statistics of batch norms and train metrics have seen it when it raises."""
    failures = [OSError("once")]

    def before_backward():
        if failures:
            raise failures.pop()

    task = Task(
        model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),
        loss=cross_entropy,
        train_dataloader=LOADERS["list"],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        train_metrics={"accuracy": MulticlassAccuracy(3)},
    )
    trainer = make_trainer(task, algorithms=[make_plugin(before_backward=before_backward)])
    with pytest.raises(OSError, match="once"):
        trainer.fit()

    with pytest.warns(UserWarning, match="batch 1 .*statistics of 0 and the metric train/accuracy"):
        trainer.fit()


def test_an_exception_at_the_end_of_the_fit_leaves_its_last_checkpoint_to_the_next(
    make_trainer, make_plugin
):
    """A disk that was full for a moment must not cost the end of a run."""
    failures = [OSError("no space left on device")]

    def fit_end():
        if failures:
            raise failures.pop()

    ended = []
    watch = make_plugin("z-watch", training_end=lambda: ended.append("training_end"))
    trainer = make_trainer(
        algorithms=[make_plugin("m-fails", fit_end=fit_end)], callbacks=[watch], max_duration="1ep"
    )
    with pytest.raises(OSError, match="no space"):
        trainer.fit()

    trainer.fit()

    assert ended == ["training_end"]


def test_a_stop_that_was_requested_before_the_exception_holds(make_trainer, make_plugin):
    """Early stopping would otherwise be forgotten with the evaluation that asked for it."""
    failures = [OSError("once")]

    def batch_end(state):
        if state.clock.batch == 1:
            state.request_stop("enough")

    def batch_checkpoint():
        if failures:
            raise failures.pop()

    trainer = make_trainer(
        algorithms=[make_plugin(batch_end=batch_end, batch_checkpoint=batch_checkpoint)]
    )
    with pytest.raises(OSError, match="once"):
        trainer.fit()

    trainer.fit()

    assert trainer.state.clock.batch == 1
    assert trainer.state.stop_reason == "enough"


def test_an_evaluation_between_the_two_fits_changes_nothing(make_trainer, make_plugin):
    """A person looks at the model before going on: `batch_end` still sees its batch and loss."""
    failures, seen = [OSError("once")], []

    def batch_end(state):
        if failures:
            raise failures.pop()
        seen.append((state.clock.batch, state.batch is not None, state.loss is not None))

    task = Task(
        model=lambda: nn.Linear(3, 3),
        loss=cross_entropy,
        train_dataloader=LOADERS["list"],
        eval_dataloaders={"v": LOADERS["list"]},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    )
    trainer = make_trainer(task, algorithms=[make_plugin(batch_end=batch_end)])
    with pytest.raises(OSError, match="once"):
        trainer.fit()
    trainer.eval()
    trainer.predict(LOADERS["list"]())

    trainer.fit()

    assert seen == [(1, True, True), (2, True, True), (3, True, True)]


class FailsOnce:
    """Raises at one call of a hook, on the given ranks."""

    name = "m-fails"

    def __init__(self, hook, ranks=(0, 1)):
        self.num_calls, self.hook, self.ranks = 0, hook, ranks

    def _count(self, state, hook):
        if hook != self.hook or state.rank not in self.ranks:
            return
        self.num_calls += 1
        if self.num_calls == 2:
            raise OSError("once")

    @hookimpl
    def before_loss(self, state):
        self._count(state, "before_loss")

    @hookimpl
    def batch_end(self, state):
        self._count(state, "batch_end")

    @hookimpl
    def eval_end(self, state):
        self._count(state, "eval_end")


def on_ranks(folder, hook):
    task = Task(
        model=lambda: nn.Linear(3, 3),
        loss=cross_entropy,
        train_dataloader=LOADERS["shuffled"],
        eval_dataloaders={"v": LOADERS["list"]},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    )
    plugins = [FailsOnce(hook)]
    with isolated_trainer(folder, task, algorithms=plugins, max_duration="2ep") as trainer:
        for _ in range(2):
            try:
                result = trainer.fit()
                break
            except OSError:
                continue
        rows = [(row["batch"], row["v/loss"], row["train/loss"]) for row in result.history]
        return trainer.state.model.weight.tolist(), rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hook", ["before_loss", "batch_end", "eval_end"])
def test_two_ranks_that_caught_the_same_exception_continue_together(hook, tmp_path):
    """Each repeats its own part of the batch, and the counts of both are added up."""
    expected = run_ranks(partial(on_ranks, tmp_path / "whole", ""))

    actual = run_ranks(partial(on_ranks, tmp_path / "interrupted", hook))

    assert actual == expected
