"""Signals: the batch is finished, a checkpoint saved, and what was there before comes back."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

from eventloop import hookimpl
from eventloop.events import EVENTS
from eventloop.signals import Terminated
from eventloop_testing import isolated_trainer, run_ranks, tiny_task

STOPPING = [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
# What happens in a fit, and how often: some of these aren't moment of a batch.
MOMENTS = [
    "training_start",
    "fit_start",
    "epoch_start",
    "before_dataloader",
    "after_forward",
    "batch_end",
    "eval_batch_end",
    "batch_checkpoint",
    "epoch_end",
    "epoch_checkpoint",
    "fit_end",
    "training_end",
]


class Saves:
    """Owns `save_checkpoint`, and notes at which batch it was called."""

    name = "saves"

    def __init__(self):
        self.saved_at = []

    @hookimpl
    def save_checkpoint(self, state):
        self.saved_at.append(state.clock.batch)
        return Path("nowhere")


class Sends:
    """Sends signals to its own process, at the first call of a hook."""

    def __init__(self, *numbers, at):
        self.numbers = numbers
        self.at = at
        self.has_sent = False

    def send(self, hook):
        if hook == self.at and not self.has_sent:
            self.has_sent = True
            for number in self.numbers:
                os.kill(os.getpid(), number)


def _sending(hook):
    def send(self):
        self.send(hook)

    return send


for _hook in EVENTS:
    setattr(Sends, _hook, hookimpl(_sending(_hook)))


@pytest.fixture
def make_run(make_trainer, make_task, make_batches):
    """Makes a trainer that saves when asked to: 2 epochs of 3 batches, evaluated after each."""

    def make_run(*callbacks, max_duration="2ep"):
        saves = Saves()
        task = make_task(eval_dataloaders=make_batches())
        trainer = make_trainer(
            task, algorithms=[saves], callbacks=callbacks, max_duration=max_duration
        )
        return trainer, saves

    return make_run


@pytest.fixture(autouse=True)
def handlers():
    """Those that Python starts with, also where the tests run in the background of a shell."""
    numbers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGUSR1: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield lambda: {number: signal.getsignal(number) for number in numbers} == numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "kind"), STOPPING)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_fit_saves_once_and_ends_whenever_the_signal_comes(
    moment, number, kind, make_run, handlers
):
    """Nothing is lost: the checkpoint is of the batch at which the fit ends."""
    trainer, saves = make_run(Sends(number, at=moment))

    with pytest.raises(kind):
        trainer.fit()

    late = moment in ("fit_end", "training_end")
    at_end_of_epoch = moment in ("eval_batch_end", "epoch_end", "epoch_checkpoint")
    at_start = moment in ("training_start", "fit_start")
    assert saves.saved_at == [trainer.state.clock.batch]
    assert trainer.state.clock.batch == (6 if late else 3 if at_end_of_epoch else not at_start)
    assert handlers()


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_next_fit_goes_on_as_if_nothing_had_been(moment, make_run):
    """Weights are those of a run that nobody disturbed."""
    expected, _ = make_run()
    expected.fit()

    trainer, _ = make_run(Sends(signal.SIGTERM, at=moment))
    with pytest.raises(Terminated):
        trainer.fit()
    if trainer.state.clock.batch < 6:
        trainer.fit()

    assert trainer.state.clock.batch == 6
    torch.testing.assert_close(
        trainer.state.model.state_dict(), expected.state.model.state_dict(), rtol=0, atol=0
    )


def test_a_signal_that_asks_for_a_checkpoint_changes_nothing_else(make_run, handlers):
    """SIGUSR1, which clusters send ahead of time."""
    trainer, saves = make_run(Sends(signal.SIGUSR1, at="batch_start"))

    trainer.fit()

    assert saves.saved_at == [1]
    assert trainer.state.clock.batch == 6
    assert handlers()


def test_without_a_signal_nothing_is_saved(make_run):
    """Control."""
    trainer, saves = make_run(Sends(at="batch_start"))

    trainer.fit()

    assert saves.saved_at == []


def test_the_second_ctrl_c_interrupts_at_once(make_run, handlers):
    """A person who can't wait presses it again."""
    trainer, saves = make_run(Sends(signal.SIGINT, signal.SIGINT, at="before_forward"))

    with pytest.raises(KeyboardInterrupt, match="at once") as caught:
        trainer.fit()

    assert (saves.saved_at, trainer.state.clock.batch) == ([], 0)
    # It is a person's, whichever hook was running.
    assert not getattr(caught.value, "__notes__", ())
    assert handlers()


def test_several_sigterms_are_one(make_run):
    """Schedulers and launchers both send it."""
    trainer, saves = make_run(Sends(*[signal.SIGTERM] * 3, at="before_forward"))

    with pytest.raises(Terminated):
        trainer.fit()

    assert saves.saved_at == [1]


def test_the_exceptions_are_those_that_a_script_expects(make_run):
    """`except KeyboardInterrupt` works, and an uncaught SystemExit gives the status 143."""
    (terminated, _), (interrupted, _) = (make_run(Sends(n, at="batch_end")) for n, _ in STOPPING)

    with pytest.raises(SystemExit) as caught:
        terminated.fit()
    with pytest.raises(KeyboardInterrupt, match="after batch 1"):
        interrupted.fit()

    assert caught.value.code == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_handler_that_was_there_is_called_and_comes_back(number, make_run):
    """After the save, since it may end the process."""
    trainer, saves = make_run(Sends(number, at="batch_start"))
    called = []

    def handler(received, frame):
        called.append((received, list(saves.saved_at)))

    signal.signal(number, handler)
    if number == signal.SIGUSR1:
        trainer.fit()
    else:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.fit()

    assert called == [(number, [] if number == signal.SIGUSR1 else [1])]
    assert signal.getsignal(number) is handler


def test_ignored_signals_stay_ignored(make_run):
    """`nohup` and shells that start in the background ask for it."""
    trainer, saves = make_run(Sends(signal.SIGINT, at="batch_start"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    trainer.fit()

    assert (saves.saved_at, trainer.state.clock.batch) == ([], 6)


def test_handlers_come_back_after_a_failure(make_run, make_plugin, handlers):
    """Whatever raises."""

    def fail():
        raise LookupError

    trainer, _ = make_run(make_plugin(batch_end=fail))

    with pytest.raises(LookupError):
        trainer.fit()

    assert handlers()


def test_other_threads_train_without_handlers(make_run, handlers):
    """Python has them in the main thread alone."""
    seen = []
    trainer, _ = make_run()
    thread = threading.Thread(target=lambda: (trainer.fit(), seen.append(handlers())))

    thread.start()
    thread.join()

    assert seen == [True]
    assert trainer.state.clock.batch == 6


def test_a_loader_that_is_slow_delays_the_end(make_trainer, make_task, make_batches):
    """Between batches a signal waits for the next one: half a batch can't be saved."""
    batches = make_batches()

    class Slow:
        def __len__(self):
            return 3

        def __iter__(self):
            yield batches[0]
            os.kill(os.getpid(), signal.SIGTERM)
            yield batches[1]
            yield batches[2]

    saves = Saves()
    trainer = make_trainer(make_task(train_dataloader=Slow()), algorithms=[saves])

    with pytest.raises(Terminated, match="after batch 2"):
        trainer.fit()

    assert saves.saved_at == [2]


def test_forks_die_of_the_signals_that_would_kill_them(make_run, make_plugin):
    """A plugin's pool of workers must end when it is told to; Ctrl-C is the main process's."""
    ends = []

    def fork():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            pid = os.fork()
            if not pid:
                os.kill(os.getpid(), number)
                os._exit(7)
            ends.append(os.waitpid(pid, 0)[1])

    trainer, saves = make_run(make_plugin(fit_start=fork))
    trainer.fit()

    assert [os.waitstatus_to_exitcode(end) for end in ends] == [
        -signal.SIGTERM,
        -signal.SIGUSR1,
        7,
    ]
    assert saves.saved_at == []


def fit_with_signals(folder, rank_of_signal, moments, number):
    """Fits on a rank, with a signal at the so-many-th event; gives where it stopped and saved."""
    found = []
    rank = int(os.environ["RANK"])
    for moment in moments:
        saves, counts = Saves(), Counts(moment, number)
        counts.is_on = rank_of_signal in (None, rank)
        settings = {"max_duration": "4ep", "algorithms": [saves], "callbacks": [counts]}
        with isolated_trainer(folder, tiny_task(), **settings) as trainer:
            try:
                trainer.fit()
                status = 0
            except SystemExit as error:
                status = error.code
        found.append((status, trainer.state.clock.batch, saves.saved_at))
    return found


class Counts:
    """Sends a signal at the so-many-th event of all that fire in a fit."""

    is_on = True

    def __init__(self, moment, number):
        self.left = moment
        self.number = number

    def send(self, hook):
        self.left -= 1
        if self.is_on and self.left == 0:
            os.kill(os.getpid(), self.number)


for _hook in EVENTS:
    if _hook not in ("init", "after_load", "before_load", "close", "exception", "log"):
        setattr(Counts, _hook, hookimpl(_sending(_hook)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank_of_signal", [None, 0, 1])
def test_ranks_stop_at_one_batch_with_one_checkpoint(tmp_path, rank_of_signal):
    """Whichever of them got the signal, and at whichever moment."""
    moments = [random.Random(rank_of_signal or 7).randrange(1, 200) for _ in range(7)]

    args = (tmp_path, rank_of_signal, moments, signal.SIGTERM)
    first, second = run_ranks(fit_with_signals, *args)

    assert first == second
    for status, batch, saved_at in first:
        assert status == 143
        assert saved_at == [batch]


def test_ranks_that_get_no_signal_go_on_to_the_end(tmp_path):
    """Control: the moments of the test above lie within the fit."""
    found = run_ranks(fit_with_signals, tmp_path, 2, [1], signal.SIGTERM)

    assert [one[0][0] for one in found] == [0, 0]
    assert all(not saved_at for ((_, _, saved_at),) in found)


def test_a_checkpoint_asked_of_one_rank_is_everybody_s(tmp_path):
    """SIGUSR1 to any of them is enough."""
    first, second = run_ranks(fit_with_signals, tmp_path, 1, [20], signal.SIGUSR1)

    assert first == second
    ((status, _, saved_at),) = first
    assert status == 0
    assert len(saved_at) == 1


def fit_with_late_signal(folder, number):
    """Fits on a rank for an epoch, with a signal to rank 1 when the last batch is done."""
    saves, sends = Saves(), Sends(number, at="epoch_checkpoint")
    sends.has_sent = os.environ["RANK"] == "0"
    with isolated_trainer(folder, tiny_task(), algorithms=[saves], callbacks=[sends]) as trainer:
        try:
            trainer.fit()
            status = 0
        except SystemExit as error:
            status = error.code
    return status, trainer.state.clock.batch, saves.saved_at


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_what_one_rank_asks_for_after_the_last_batch_is_granted(tmp_path, number, status):
    """No batch is left whose exchange would tell the others."""
    first, second = run_ranks(fit_with_late_signal, tmp_path, number)

    found, batch, saved_at = first
    assert first == second
    assert (found, saved_at) == (status, [batch])
