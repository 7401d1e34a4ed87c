"""Everyday modes: limits, overfitting, dry runs, sanity evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import TaskError, hookimpl
from eventloop.data.combine import FirstBatches, known_length
from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.modes import LimitBatches, Overfit, dry_run


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(3), torch.tensor(1)


class Called:
    """An observer that gathers the hooks that are called, whoever implements them."""

    def __init__(self) -> None:
        self.hooks: set[str] = set()

    def observed(self, one):
        def plain(*args):
            self.hooks.add(one.hook.name)
            return one.function(*args)

        return one if one.wrapper else replace(one, function=plain)


def test_limits_hold_in_training_and_evaluation(make_trainer, make_task, make_batches):
    """The epoch ends early, and is an epoch like any other."""
    task = make_task(train_dataloader=make_batches(5), eval_dataloaders=make_batches(4))
    seen = []
    limit = LimitBatches(train_batches=2, eval_batches=3)
    trainer = make_trainer(task, algorithms=[limit], max_duration="3ep")
    move, trainer._loop.move = trainer._loop.move, lambda batch: seen.append(1) or move(batch)

    trainer.fit()

    assert (trainer.state.clock.epoch, trainer.state.clock.batch) == (3, 6)
    assert len(seen) == 3 * (2 + 3)


@pytest.mark.parametrize(
    ("dataloader", "limit", "length"),
    [([1, 2, 3], 2, 2), ([1], 2, 1), (DataLoader(Endless(), 4), 2, None)],
)
def test_a_limited_loader_knows_its_length_where_the_loader_does(dataloader, limit, length):
    """Fractions of an epoch, and of the run, are counted with it."""
    first = FirstBatches(dataloader, limit)

    assert known_length(first) == length


def test_a_limited_loader_tells_its_sampler_the_epoch():
    """Ranks would draw the same order each epoch."""
    data = TensorDataset(torch.arange(8))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)

    first = FirstBatches(DataLoader(data, 2, sampler=sampler), 2)
    Feed(first, Processes()).start_epoch(3)

    assert sampler.epoch == 3


def test_an_endless_loader_gets_an_end(make_trainer, make_task):
    """With a limit, epochs make sense."""
    task = make_task(train_dataloader=DataLoader(Endless(), 4))
    trainer = make_trainer(task, algorithms=[LimitBatches(train_batches=2)], max_duration="2ep")

    trainer.fit()

    assert trainer.state.clock.batch == 4


def test_overfitting_sees_the_same_batches_in_training_and_evaluation(
    make_trainer, make_task, make_recorder, make_plugin
):
    """A shuffled loader would bring others in each epoch."""
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 3)
    task = make_task(train_dataloader=DataLoader(data, 4, shuffle=True))
    seen, evaluated = [], []
    watch = make_plugin(
        "watch",
        batch_start=lambda state: seen.append(state.inputs),
        eval_batch_start=lambda state: evaluated.append(state.inputs),
    )
    trainer = make_trainer(
        task, algorithms=[Overfit(batches=2)], callbacks=[watch], max_duration="3ep"
    )

    result = trainer.fit()

    assert len(seen) == 6
    assert all(torch.equal(one, seen[idx % 2]) for idx, one in enumerate(seen + evaluated))
    assert list(result.metrics) == ["overfit"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LimitBatches(),
        lambda: LimitBatches(train_batches=0),
        lambda: LimitBatches(eval_batches=-1),
        lambda: Overfit(batches=0),
        lambda: Overfit(batches=0.5),
    ],
)
def test_what_is_no_number_of_batches_is_refused(make):
    """It would train on nothing, or on everything."""
    with pytest.raises(ValueError, match="batches"):
        make()


def test_a_dry_run_calls_every_hook_that_a_run_calls(
    make_trainer, make_task, make_batches, make_recorder, make_plugin, tmp_path
):
    """What breaks after ten hours breaks after ten seconds; `every=` and savers included."""

    class Saver:
        @hookimpl(every="4ba")
        def batch_end(self, state):
            state.request_checkpoint()

        @hookimpl
        def save_checkpoint(self, state):
            saved.append(state.clock.batch)
            return state.run_dir

    saved: list[int] = []
    task = make_task(train_dataloader=make_batches(6), eval_dataloaders=make_batches(3))
    task.scheduler = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
    full, dry, short = Called(), Called(), Called()
    given = {"callbacks": [make_recorder()], "device": "cpu", "autoload": False}
    with make_trainer(task, max_duration="2ep", algorithms=[Saver()], observers=[full],
                      callbacks=[make_recorder()]) as trainer:  # fmt: skip
        trainer.fit()
        trainer.export(tmp_path / "weights.safetensors")
    num_saved = len(saved)
    make_trainer(task, max_duration="1ba", observers=[short], **given).fit()
    result = dry_run(task, algorithms=[Saver()], observers=[dry], max_duration="9ep", **given)

    assert full.hooks - dry.hooks == set()
    assert full.hooks - short.hooks != set()  # the comparison can fail
    assert {"close", "fit_end", "save_checkpoint", "export", "eval_end", "log"} <= dry.hooks
    assert len(saved) > num_saved
    assert not result.run_dir.exists()


def test_a_dry_run_tells_of_a_plugin_that_breaks_late(make_task, make_plugin, clean):
    """An event of the end, and a hook that runs once in a thousand batches."""

    class Late:
        @hookimpl(every="1000ba")
        def batch_end(self, state):
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        dry_run(make_task(), callbacks=[Late()], device="cpu", autoload=False)


class Broken(MulticlassAccuracy):
    def compute(self):
        raise RuntimeError("broken metric")


def test_a_broken_metric_shows_before_the_first_step(make_trainer, make_task, make_batches):
    """Not after the first epoch."""
    task = make_task(eval_dataloaders={"test": make_batches(4)}, metrics={"a": Broken(3)})
    trainer = make_trainer(task)

    with pytest.raises(RuntimeError, match="broken metric") as caught:
        trainer.sanity_eval(2)

    assert trainer.state.clock.batch == 0
    assert any("sanity evaluation of 'test'" in note for note in caught.value.__notes__)


def test_a_sanity_evaluation_leaves_no_trace(make_trainer, make_task, make_batches, make_recorder):
    """Numbers of an untrained model belong nowhere, and training goes as without it."""
    weights = []
    for sane in (True, False):
        data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
                             torch.arange(8) % 3)  # fmt: skip
        task = make_task(
            train_dataloader=DataLoader(data, 2, shuffle=True),
            eval_dataloaders=DataLoader(data, 2, shuffle=True),
            metrics={"accuracy": MulticlassAccuracy(3)},
        )
        recorder = make_recorder()
        trainer = make_trainer(task, callbacks=[recorder])
        if sane:
            del recorder.seen[:]
            trainer.sanity_eval()
            assert (recorder.seen, trainer.state.eval_metrics) == ([], {})
            assert not trainer.state.metrics["eval/eval"]["accuracy"].update_called
        trainer.fit()
        weights.append(trainer.state.model.weight)

    assert torch.equal(*weights)


def test_a_sanity_evaluation_needs_eval_data(make_trainer):
    """It would say that all is well."""
    with pytest.raises(TaskError, match="no eval data loader"):
        make_trainer().sanity_eval()
    with pytest.raises(ValueError, match="evaluates nothing"):
        make_trainer().sanity_eval(0)
