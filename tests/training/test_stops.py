"""A run that is stopped says so in Python: the result, a line, and what a second fit does about it."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from eventloop import Moment, Trainer, hookimpl
from eventloop.signals import StopReason
from eventloop.training.stops import ANSWERED, Stopped
from eventloop_testing import run_ranks, tiny_batches, tiny_task


def stop_at(batch):
    """Returns an implementation of an event that requests a stop."""
    return lambda state: state.request_stop("enough") if state.clock.batch == batch else None


@pytest.mark.parametrize("role", ["algorithms", "callbacks"])
@pytest.mark.parametrize("event", ["batch_end", "eval_after_all", "epoch_end"])
def test_the_result_has_reason_plugin_and_moment(
    role, event, make_trainer, make_task, make_plugin, make_batches, capsys
):
    """A script that stops after 7 of 100 epochs would look as if it had trained for all of them."""
    plugin = make_plugin("watcher", **{event: lambda state: state.request_stop("enough")})
    task = make_task(eval_dataloaders=make_batches())
    trainer = make_trainer(task, max_duration="9ep", **{role: [plugin]})

    result = trainer.fit()

    epochs, batches = (0, 1) if event == "batch_end" else (1, 3)
    assert result.stopped.reason == "enough"
    assert result.stopped.plugin == f"watcher (Trainer({role}=...))"
    assert result.stopped.moment == trainer.state.clock.moment()
    assert result.stopped.moment[:2] == (epochs, batches)
    text = f"stopped by watcher (Trainer({role}=...)): enough"
    assert f", {text} (" in repr(result)
    assert text in result._repr_html_()
    assert f"eventloop: {text} (" in capsys.readouterr().err


def test_a_run_that_is_not_stopped_says_nothing(make_trainer, capsys):
    """Control."""
    result = make_trainer().fit()

    assert result.stopped is None
    assert "stopped" not in repr(result) + result._repr_html_() + capsys.readouterr().err


def test_who_answers_should_stop_is_named(make_trainer, make_plugin, capsys):
    """Such a plugin gives no reason, so its name is all there is."""
    silent = make_plugin("silent", should_stop=lambda state: None)
    other = make_plugin("other", should_stop=lambda state: False)
    ends = make_plugin("ends", should_stop=lambda state: state.clock.batch >= 2)

    result = make_trainer(algorithms=[silent, ends], callbacks=[other], max_duration="2ep").fit()

    assert result.stopped.plugin == "ends (Trainer(algorithms=...))"
    assert result.stopped.reason == ANSWERED
    assert "stopped by ends (" in capsys.readouterr().err


def test_a_task_that_ends_its_own_run_is_no_news(make_trainer, make_task, capsys):
    """It counts steps of its own; the result has it all the same."""
    task = make_task().hooks()
    task.should_stop = hookimpl(lambda state: state.clock.batch >= 2)

    result = make_trainer(task, max_duration="2ep").fit()

    assert result.stopped.plugin == "task"
    assert result.stopped.is_planned
    assert "stopped" not in capsys.readouterr().err


def test_a_caller_s_stop_has_no_plugin(make_trainer, make_plugin):
    """A button in a notebook asks from a thread of its own."""
    import threading

    trainer = make_trainer(
        max_duration="9ep", callbacks=[make_plugin(batch_end=lambda state: ask())]
    )

    def ask():
        thread = threading.Thread(target=trainer.state.request_stop, args=["the button"])
        thread.start()
        thread.join()

    result = trainer.fit()

    assert result.stopped == Stopped("the button", None, trainer.state.clock.moment())
    assert str(result.stopped) == "stopped: the button (0 epochs, 1 batch)"


def test_a_second_fit_that_goes_on_warns(make_trainer, make_plugin):
    """It trains on although a plugin has ended the run; `until` says that this is meant."""
    plugin = make_plugin("once", batch_end=stop_at(2))
    trainer = make_trainer(algorithms=[plugin], max_duration="2ep")
    trainer.fit()

    with pytest.warns(
        UserWarning, match=r"run was stopped by once .*: enough \(0 epochs, 2 batches\)"
    ):
        result = trainer.fit()

    assert result.stopped is None
    assert trainer.state.clock.epoch == 2


def test_until_continues_a_stopped_run_without_a_warning(make_trainer, make_plugin):
    """It is the way to say that the stop doesn't count."""
    trainer = make_trainer(algorithms=[make_plugin(batch_end=stop_at(2))], max_duration="2ep")
    trainer.fit()

    result = trainer.fit(until="2ep")

    assert result.stopped is None
    assert trainer.state.clock.epoch == 2


def test_a_second_fit_that_is_stopped_at_once_warns_that_nothing_was_trained(
    make_trainer, make_plugin, capsys
):
    """A plugin that waits for a metric stays of its opinion; the call would return at once, in silence."""

    class Waits:
        name = "waits"

        @hookimpl
        def fit_start(self, state):
            if state.clock.batch:
                state.request_stop("waits: no better")

        @hookimpl
        def batch_end(self, state):
            state.request_stop("waits: no better")

    trainer = make_trainer(callbacks=[Waits()], max_duration="2ep")
    trainer.fit()
    capsys.readouterr()

    with pytest.warns(UserWarning, match="nothing was trained") as caught:
        result = trainer.fit()

    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith("nothing was trained: the run is stopped by waits (")
    assert ": no better (0 epochs, 1 batch)" in message
    assert result.stopped.plugin == "waits (Trainer(callbacks=...))"
    assert "stopped" not in capsys.readouterr().err


def test_a_resumed_run_that_was_stopped_has_it_in_its_result(make_trainer, make_plugin, tmp_path):
    """Another process knows it from the checkpoint."""

    def fit():
        plugin = make_plugin("stopper", batch_end=stop_at(2))
        settings = {"run_dir": tmp_path / "run", "checkpoint_interval": "1ep"}
        return make_trainer(algorithms=[plugin], max_duration="2ep", **settings).fit()

    first = fit()
    with pytest.warns(UserWarning, match="nothing to train: the run was stopped"):
        second = fit()

    assert second.stopped == first.stopped


def test_every_rank_knows_whose_stop_it_was(tmp_path, capfd):
    """The rank that asks is one of them; the others only follow."""

    def fit():
        class Asks:
            name = "asks"

            @hookimpl
            def batch_end(self, state):
                if state.rank == 1:
                    state.request_stop("asks: enough")

        task = tiny_task(train_dataloader=tiny_batches(40))
        settings = {"device": "cpu", "autoload": False, "max_duration": "9ep"}
        with Trainer(task, callbacks=[Asks()], **settings) as trainer:
            return trainer.fit().stopped

    first, second = run_ranks(fit)

    assert first.plugin == second.plugin == "asks (Trainer(callbacks=...))"
    assert first.moment.batch == second.moment.batch
    assert capfd.readouterr().err.count("eventloop: stopped by asks (") == 1


def test_a_signal_is_no_plugin_s_stop(make_trainer, make_plugin):
    """It comes in the middle of whatever plugin is under way."""
    import os
    import signal

    plugin = make_plugin(batch_end=lambda state: os.kill(os.getpid(), signal.SIGTERM))
    trainer = make_trainer(callbacks=[plugin])

    with pytest.raises(SystemExit):
        trainer.fit()

    assert trainer.state.stop_reason.plugin is None


def test_a_record_is_frozen_and_a_reason_travels():
    """Ranks send each other reasons by pickle."""
    reason = pickle.loads(pickle.dumps(StopReason("enough", "pruned", "by (a 1)")))
    stopped = Stopped(str(reason), reason.plugin, Moment(1, 3, 12, 0, 0.1))

    assert (reason, reason.kind, reason.plugin) == ("enough", "pruned", "by (a 1)")
    with pytest.raises(FrozenInstanceError):
        stopped.reason = "other"


def test_the_command_says_it_once(run, tiny):
    """What fit writes for scripts isn't doubled there."""
    (tiny / "stops.py").write_text(
        "from eventloop import hookimpl\n"
        "class Stops:\n"
        "    @hookimpl\n"
        "    def batch_end(self, state):\n"
        "        state.request_stop('enough')\n"
    )

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "./stops.py:Stops")

    assert ran.status == 0, ran.err
    assert (ran.out + ran.err).count("stopped by stops (") == 1
