"""Questions: what the loop does with an answer."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from eventloop import Time, schedules
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.errors import PluginError


def decay(optimizer):
    return StepLR(optimizer, step_size=1, gamma=0.5)


def at_batch(batch: int):
    """An answer: yes while that many batches are done."""
    return lambda state: state.clock.batch == batch


def test_a_skipped_batch_counts_but_trains_nothing(make_trainer, make_task, make_plugin):
    """The clock goes on, so that skipping never changes how long a run is."""
    losses = []
    skipper = make_plugin(should_skip_batch=lambda state: True,
                          batch_end=lambda state: losses.append(state.loss))  # fmt: skip
    trainer = make_trainer(make_task(scheduler=decay), algorithms=[skipper])
    before = trainer.state.model.weight.clone()

    trainer.fit()

    assert torch.equal(trainer.state.model.weight, before)
    assert trainer.state.clock.moment()[:3] == (1, 3, 12)
    assert losses == [None] * 3
    assert trainer.state.optimizers["sgd"].param_groups[0]["lr"] == 0.1


def test_a_skipped_batch_fires_nothing_of_train_batch(make_trainer, make_recorder, make_plugin):
    """`batch_start` goes straight to `batch_end`."""
    recorder = make_recorder(["batch_start", "before_train_batch", "before_forward",
                              "after_train_batch", "batch_end"])  # fmt: skip
    skipper = make_plugin(should_skip_batch=lambda state: state.clock.batch > 0)

    make_trainer(algorithms=[recorder, skipper]).fit()

    assert recorder.seen == ["batch_start", "before_train_batch", "before_forward",
                             "after_train_batch", "batch_end",
                             *["batch_start", "batch_end"] * 2]  # fmt: skip


def test_a_skipped_step_drops_its_gradients_and_holds_the_scheduler(
    make_trainer, make_task, make_plugin
):
    """A step after a bad batch must be as if that batch had not been."""
    skipper = make_plugin(should_skip_step=at_batch(0))
    task = make_task(scheduler=decay)
    trainer = make_trainer(task, algorithms=[skipper])
    before = trainer.state.model.weight.clone()

    trainer.fit(until="1ba")

    assert torch.equal(trainer.state.model.weight, before)
    assert trainer.state.model.weight.grad is None
    assert trainer.state.optimizers["sgd"].param_groups[0]["lr"] == 0.1


def test_schedulers_move_once_a_step(make_trainer, make_task, make_plugin):
    """Two of three batches made a step, so two of three halvings happen."""
    skipper = make_plugin(should_skip_step=at_batch(1))
    trainer = make_trainer(make_task(scheduler=decay), algorithms=[skipper])

    trainer.fit()

    assert trainer.state.optimizers["sgd"].param_groups[0]["lr"] == 0.1 * 0.5**2


def test_an_ended_epoch_is_complete(make_trainer, make_task, make_plugin):
    """What is left of the data is dropped, epoch counter and schedulers move."""
    ender = make_plugin(should_end_epoch=lambda state: state.clock.batch_in_epoch == 2)
    task = make_task(scheduler=decay, scheduler_interval="ep")
    trainer = make_trainer(task, algorithms=[ender], max_duration="3ep")

    trainer.fit()

    assert trainer.state.clock.moment()[:2] == (3, 6)
    assert trainer.state.optimizers["sgd"].param_groups[0]["lr"] == 0.1 * 0.5**3


def test_schedulers_of_epochs_wait_for_the_whole_epoch(make_trainer, make_task):
    """Half an epoch, then the other half, is one."""
    task = make_task(scheduler=decay, scheduler_interval="ep")
    trainer = make_trainer(task)
    rates = []

    for until in ("2ba", "3ba"):
        trainer.fit(until)
        rates.append(trainer.state.optimizers["sgd"].param_groups[0]["lr"])

    assert rates == [0.1, 0.05]


def test_the_data_loader_is_built_again_where_somebody_asks(
    make_trainer, make_task, make_batches, make_plugin
):
    """Growing batches or images between epochs is one answer, not a patch of the loader."""
    built, lengths = [], []

    def build():
        built.append(make_batches(len(built) + 1))
        return built[-1]

    grower = make_plugin(
        should_rebuild_dataloader=lambda state: state.clock.epoch == 2,
        epoch_start=lambda state: lengths.append(len(state.train_dataloader)),
    )

    make_trainer(make_task(train_dataloader=build), algorithms=[grower], max_duration="4ep").fit()

    assert lengths == [1, 1, 2, 2]


def longer_later(make_plugin, loaders):
    """A plugin that gives these data loaders, an epoch each."""
    return make_plugin(
        "longer",
        should_rebuild_dataloader=lambda state: True,
        build_train_dataloader=lambda state: loaders[state.clock.epoch],
    )


def test_a_schedule_counted_in_epochs_follows_their_length(
    make_trainer, make_task, make_batches, make_plugin
):
    """Half an epoch is half of the one under way, whatever the first one had."""
    rates = []
    plugins = [
        longer_later(make_plugin, [make_batches(2), make_batches(4), iter(make_batches(2))]),
        make_plugin("rates", batch_start=lambda state: rates.append(rate_of(state))),
    ]
    task = make_task(scheduler=schedules.linear())

    make_trainer(task, algorithms=plugins, max_duration="3ep").fit()

    positions = [0, 1 / 2, 1, 5 / 4, 6 / 4, 7 / 4, 2, 2]
    assert rates == pytest.approx([0.1 * (1 - position / 3) for position in positions])


def rate_of(state):
    return state.optimizers["sgd"].param_groups[0]["lr"]


def test_a_run_goes_on_with_the_data_loader_that_it_had(
    tmp_path, make_trainer, make_task, make_batches, make_plugin
):
    """In the middle of an epoch of another data loader than the first; it leaves the same files."""
    kept = {}
    for folder, ends in (("whole", [None]), ("parts", ["4ba", "5ba", None])):
        for end in ends:
            longer = longer_later(make_plugin, [make_batches(2), make_batches(4), make_batches(1)])
            settings = {"run_dir": tmp_path / folder, "checkpoint_interval": "1ba"}
            trainer = make_trainer(algorithms=[longer], max_duration="3ep", **settings)
            trainer.fit(until=end)
            trainer.close()
        kept[folder] = read_checkpoint(tmp_path / folder / "checkpoints" / "ba00000007").parts

    assert list(differences(kept["whole"], kept["parts"])) == []


def test_any_yes_stops_after_the_batch(make_trainer, make_plugin):
    """One plugin is enough, and none must answer."""
    answers = [make_plugin("a", should_stop=lambda state: False),
               make_plugin("b", should_stop=lambda state: None),
               make_plugin("c", should_stop=at_batch(2))]  # fmt: skip
    trainer = make_trainer(callbacks=answers)

    trainer.fit()

    assert trainer.state.clock.batch == 2


def test_the_first_reason_to_stop_is_kept(make_trainer, make_plugin):
    """What came later is a consequence, not the cause."""

    def stop_twice(state):
        state.request_stop("a")
        state.request_stop("b")

    stopper = make_plugin(batch_end=stop_twice)
    trainer = make_trainer(callbacks=[stopper])

    trainer.fit()

    assert trainer.state.stop_reason == "a"
    assert trainer.state.clock.batch == 1


def test_a_requested_checkpoint_is_saved_once(make_trainer, make_plugin):
    """At one batch count saving happens at most once, though it is asked after batch and epoch."""
    saved = []

    def save_checkpoint(state):
        saved.append(state.clock.batch)
        return state.run_dir

    saver = make_plugin("saver", save_checkpoint=save_checkpoint)
    asker = make_plugin("asker", should_checkpoint=at_batch(3),
                        batch_end=lambda state: state.request_checkpoint()
                        if state.clock.batch == 1 else None)  # fmt: skip

    make_trainer(algorithms=[saver], callbacks=[asker], max_duration="2ep").fit()

    assert saved == [1, 3]


@pytest.mark.parametrize("answer", [1, "yes", [], 0.0])
def test_an_answer_that_is_no_answer_is_refused(answer, make_trainer, make_plugin):
    """`should_stop` that returns a list forgot something; its truth would be a guess."""
    with pytest.raises(PluginError, match=r"should_stop was answered with .*True, False"):
        make_trainer(callbacks=[make_plugin(should_stop=lambda state: answer)]).fit()


@pytest.mark.parametrize(("end", "batches"), [("1ep", 3), ("3ep", 9), ("4ba", 4)])
def test_an_algorithm_may_move_the_end_of_a_fit(end, batches, make_trainer, make_plugin):
    """A method may know better how long to train; who asks for the end, is told of the new one."""
    seen = []

    def move(state):
        state.until = Time(end)

    mover = make_plugin(fit_start=move, epoch_start=lambda state: seen.append(str(state.until)))
    trainer = make_trainer(algorithms=[mover], max_duration="2ep")

    trainer.fit()

    assert trainer.state.clock.batch == batches
    assert trainer.state.stop_reason is None
    assert set(seen) == {end}
