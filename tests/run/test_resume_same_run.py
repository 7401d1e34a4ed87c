"""A run goes on with the plugins, options and settings that it was begun with, or says what differs."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import sys
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR, StepLR

from eventloop import ResumeError, Task, Trainer, TrainerBuilder, hookimpl, schedules
from eventloop.checkpoint.saved_tensors import SavedTensor
from eventloop.errors import CheckpointError, UsageError
from eventloop.run.differences import NOTHING, Allowed
from eventloop_testing.case import tiny_batches, tiny_task

DOUBLES = """
from eventloop import hookimpl
class Plugin:
    \"\"\"Doubles.

    Args:
        times: how often.
    \"\"\"
    def __init__(self, *, times: int = 2):
        self.times = times
        self.count = 0
        self.versions = []
    @hookimpl
    def before_train_batch(self, state):
        self.count += 1
        state.inputs = state.inputs * self.times
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state, version):
        self.count = state["count"]
        self.versions.append(version)
"""
CALLS = (
    "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def batch_end(self): pass\n"
)


@pytest.fixture
def run(clean, monkeypatch):
    """Starts or goes on with the run in one folder, and trains until a moment."""
    monkeypatch.delenv("EVENTLOOP_RUN_DIR", raising=False)

    def run(until=None, given=None, *, allowed=NOTHING, origin=None, **settings):
        values = {"device": "cpu", "run_dir": clean / "out", "max_duration": "2ep"} | settings
        values = {"checkpoint_interval": "1ba"} | values
        builder = TrainerBuilder(allowed=allowed, origin=origin)
        with builder.build(given or tiny_task(), **values) as trainer:
            trainer.fit(until)
            weights = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}
            return trainer, weights

    return run


def uninstall(tmp_path, name):
    for path in (tmp_path / "site").glob(f"*{name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    sys.modules.pop(f"eventloop_{name}_module", None)
    importlib.invalidate_caches()


def test_a_newly_installed_algorithm_stays_out(run, install, clean):
    """What a run does is chosen at its first start; an installation in between changes no byte."""
    _, expected = run()
    shutil.rmtree(clean / "out")
    run("2ba")
    install("doubles", DOUBLES)

    trainer, actual = run()

    assert all(torch.equal(one, actual[name]) for name, one in expected.items())
    reasons = {one.found.name: one.reason for one in trainer.off}
    assert (
        reasons["doubles"]
        == "not part of this run: installed after the run began; add it with `algorithms=[...]`"
    )


def test_an_algorithm_that_was_off_stays_off(run, install, clean):
    """Whatever switched it off then needn't be said again."""
    from eventloop.config.configuration import Configuration
    from eventloop.config.plugin_flags import Choice

    install("doubles", DOUBLES)
    values = {"device": "cpu", "run_dir": clean / "out", "checkpoint_interval": "1ba"}
    without = Configuration.read(values, choice=Choice(off=("doubles",)))
    with TrainerBuilder(without).build(tiny_task()) as trainer:
        trainer.fit("2ba")

    trainers = [run(until, max_duration=None)[0] for until in ("3ba", "4ba")]

    for trainer in trainers:
        reasons = {one.found.name: one.reason for one in trainer.off}
        assert reasons["doubles"] == "not part of this run: off when it began, -p no:doubles"


def test_a_new_callback_takes_part(run, install):
    """It only watches."""
    run("2ba")
    install("calls", CALLS, group="eventloop.callbacks")

    trainer, _ = run()

    assert "calls" in [one.name for one in trainer.plugins]


def test_a_missing_algorithm_stops_with_the_command_that_brings_it(run, install, tmp_path):
    """Without it the run would be another one."""
    install("doubles", DOUBLES)
    run("2ba")
    uninstall(tmp_path, "doubles")

    with pytest.raises(ResumeError, match="was begun with doubles, which isn't here") as caught:
        run()

    assert "pip install eventloop-doubles==1.0" in str(caught.value)
    assert 'allowed=Allowed(missing_plugin=("doubles",))' in str(caught.value)


def test_what_a_missing_algorithm_kept_is_kept_for_its_return(run, install, tmp_path):
    """One start without it needn't cost its state."""
    install("doubles", DOUBLES)
    run("2ba")
    uninstall(tmp_path, "doubles")
    trainer, _ = run("3ba", allowed=Allowed(missing_plugin=("doubles",)))
    assert "doubles is missing; its saved state is carried over" in trainer.notes
    install("doubles", DOUBLES)

    trainer, _ = run("4ba")

    assert trainer.state.plugin("doubles").count == 2 + 1


def test_another_version_of_an_algorithm_is_refused_unless_allowed(run, install, tmp_path):
    """It may compute something else; a state of the old version is told by its version."""
    install("doubles", DOUBLES)
    run("2ba")
    uninstall(tmp_path, "doubles")
    install("doubles", DOUBLES, version="1.1")

    with pytest.raises(ResumeError, match=re.escape("doubles: 1.0 -> 1.1")) as caught:
        run()
    assert 'allowed=Allowed(plugin_change=("doubles",))' in str(caught.value)
    trainer, _ = run(allowed=Allowed(plugin_change=("doubles",)))

    assert trainer.state.plugin("doubles").versions == ["1.0"]


def test_another_option_of_an_algorithm_is_refused(run, install, monkeypatch):
    """Options are part of what the run is."""
    install("doubles", DOUBLES)
    run("2ba")
    monkeypatch.setenv("EVENTLOOP_DOUBLES__TIMES", "3")

    with pytest.raises(ResumeError, match=re.escape("doubles.times: none -> 3")):
        run()


def test_another_learning_rate_is_refused_with_the_difference(run):
    """It would be put back by the checkpoint in silence."""
    run("2ba")
    edited = tiny_task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2))

    with pytest.raises(ResumeError, match="begun with another configuration") as caught:
        run(given=edited)

    assert "optimizers.sgd.groups.0.lr: 0.1 -> 0.2" in str(caught.value)
    assert "allowed=Allowed(config_change=True)" in str(caught.value)


def tiny(lr=0.1, weight_decay=0.0, scheduler=None):
    """A task with one of SGD's."""
    return tiny_task(
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=lr, weight_decay=weight_decay
        ),
        scheduler=scheduler,
    )


LINEAR = schedules.linear(final_frac=0.5)
TORCHS = {
    "LambdaLR": lambda one: LambdaLR(one, lambda step: 0.5**step),
    "StepLR": lambda one: StepLR(one, 1, 0.5),
    "CosineAnnealingLR": lambda one: CosineAnnealingLR(one, T_max=8),
    "SequentialLR": lambda one: SequentialLR(
        one, [StepLR(one, 1, 0.5), LambdaLR(one, lambda step: 0.5**step)], [2]
    ),
}


def rate_and_decay(trainer):
    """What the optimizer would take the next step with."""
    (group,) = trainer.state.optimizers["sgd"].param_groups
    return float(group["lr"]), group["weight_decay"]


def test_an_optimizers_numbers_that_may_change_do(run):
    """Shown as changed and put back by the checkpoint, they would be a lie; not twice as far the second time."""
    run("2ba")

    trainer, _ = run("3ba", tiny(0.2, 0.01), allowed=Allowed(config_change=True))
    again, _ = run("4ba", tiny(0.2, 0.01))

    assert rate_and_decay(trainer) == rate_and_decay(again) == (0.2, 0.01)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheduler", [LINEAR, *TORCHS.values()], ids=["linear", *TORCHS])
def test_a_changed_rate_keeps_its_place_in_the_schedule(run, clean, scheduler):
    """The next step is taken at what the schedule makes of the new one, and so are those after it."""
    trainer, _ = run("4ba", tiny(scheduler=scheduler))
    expected = [2 * rate_and_decay(trainer)[0]]
    changed = TrainerBuilder(allowed=Allowed(config_change=True))
    given = {"device": "cpu", "run_dir": clean / "out", "max_duration": "2ep"}
    with changed.build(tiny(0.2, scheduler=scheduler), checkpoint_interval="1ba", **given) as other:
        rates = [rate_and_decay(other)[0]]
        other.fit("5ba")
        rates.append(rate_and_decay(other)[0])
    shutil.rmtree(clean / "out")
    trainer, _ = run("5ba", tiny(scheduler=scheduler))

    assert rates == pytest.approx([*expected, 2 * rate_and_decay(trainer)[0]])


def test_kernels_of_an_optimizer_may_be_chosen_later(run):
    """None, the default, takes the place of True."""

    def adam(**given):
        return tiny_task(optimizer=lambda model: torch.optim.Adam(model.parameters(), **given))

    run("2ba", adam())

    trainer, _ = run("3ba", adam(fused=True), allowed=Allowed(config_change=True))

    assert trainer.state.optimizers["adam"].param_groups[0]["fused"] is True


def test_a_batch_that_failed_leaves_checkpoints_that_can_be_resumed(run, clean):
    """It was taken, and not trained on; a run of one epoch would be lost with its checkpoints."""

    class Fails:
        failures = [ValueError("once")]

        @hookimpl
        def before_forward(self, state):
            if state.clock.batch == 1 and self.failures:
                raise self.failures.pop()

    task = tiny_task(train_dataloader=tiny_batches(6))
    settings = {"device": "cpu", "run_dir": clean / "out", "max_duration": "2ep"}
    settings |= {"checkpoint_interval": "1ba", "algorithms": [Fails()]}
    with Trainer(task, **settings) as trainer:
        with pytest.raises(ValueError, match="once"):
            trainer.fit()
        trainer.fit("3ba")
    with Trainer(task, **settings) as trainer:
        trainer.fit()

    assert trainer.state.clock.epoch == 2


def test_a_schedule_that_may_change_does(run):
    """A run that fell to 0 couldn't be trained longer: its warning says to give the schedule a longer duration."""
    fallen = schedules.cosine(duration="4ba")
    run("4ba", tiny(scheduler=fallen))
    longer = tiny(scheduler=schedules.cosine(duration="8ba"))

    trainer, _ = run("6ba", longer, allowed=Allowed(config_change=True))

    assert rate_and_decay(trainer)[0] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * 6 / 8)))


def test_the_warm_up_of_a_plateau_may_change_too(run):
    """It is a schedule as the others are: the next batch is on the new one."""
    short, long = (
        tiny(scheduler=schedules.plateau("min test/loss", patience=99, warmup=warmup))
        for warmup in ("2ba", "5ba")
    )
    run("2ba", short, eval_interval="1ba")

    trainer, _ = run("3ba", long, eval_interval="1ba", allowed=Allowed(config_change=True))

    assert rate_and_decay(trainer)[0] == pytest.approx(0.1 * 3 / 5)


def test_another_setting_is_refused_unless_allowed(run):
    """The difference is shown as it is in a diff."""
    run("2ba")

    with pytest.raises(ResumeError, match=re.escape("settings.clip_norm: none -> 1.0")):
        run(clip_norm=1.0)
    trainer, _ = run(clip_norm=1.0, allowed=Allowed(config_change=True))

    assert "changed since the run began: settings.clip_norm: none -> 1.0" in trainer.notes


@pytest.mark.parametrize("size", [1, None])
def test_another_microbatch_size_counts(run, size):
    """A rank that takes more samples needs smaller ones; a plugin's own is kept otherwise."""
    run("2ba", microbatch_size=2)

    trainer, _ = run("3ba", microbatch_size=size, allowed=Allowed(config_change=True))

    assert trainer.state.microbatch_size == size


def test_settings_that_change_no_weight_may_differ(run):
    """How often to save and to log is a matter of taste."""
    run("2ba")

    trainer, _ = run(log_interval="1ba", checkpoint_keep=1, on_save_error="continue")

    assert trainer.state.clock.batch == 6


def test_a_task_file_that_was_edited_is_refused_with_its_lines(run):
    """As a person would see it in a review."""
    one = {"digest": "sha256:1", "options": {}, "source": "def task():\n    lr = 0.1\n"}
    other = {"digest": "sha256:2", "options": {}, "source": "def task():\n    lr = 0.2\n"}
    run("2ba", origin=one)

    with pytest.raises(ResumeError) as caught:
        run(origin=other)

    assert "-    lr = 0.1" in str(caught.value)
    assert "+    lr = 0.2" in str(caught.value)


def test_a_model_of_another_shape_is_refused_in_a_sentence(run):
    """The checkpoint stays as it is."""
    from torch import nn

    run("2ba")

    with pytest.raises(Exception, match="doesn't fit this model"):
        run(given=tiny_task(model=lambda: nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 3))))


def test_weights_that_vanish_before_they_are_read_are_told_of(run, clean):
    """As those do that one process evaluates while another trains, which keeps the newest alone."""
    from torch import nn

    run("2ba")

    def model():
        for path in clean.rglob("model.safetensors"):
            path.unlink()
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    with pytest.raises(CheckpointError, match=r"^the checkpoint '.*' can't be used: model.safet"):
        run(given=tiny_task(model=model))


def test_never_refuses_a_folder_that_holds_a_run(run):
    """Two runs in one folder could not be told apart."""
    run("2ba")

    with pytest.raises(ResumeError, match=r"resume='never', but .* holds a run already"):
        run(resume="never")


def test_another_run_may_begin_with_a_checkpoint(run, clean):
    """A branch goes on from where it was begun, and after a kill from where it was."""
    run("4ba")
    path = clean / "out" / "checkpoints" / "ba00000003"

    first, _ = run("5ba", run_dir=clean / "branch", resume=str(path))
    second, _ = run("6ba", run_dir=clean / "branch", resume=str(path))

    assert "batch 3" in first.notes[0]
    assert "batch 5" in second.notes[0]


def test_an_older_checkpoint_of_the_same_run_is_refused(run, clean):
    """What comes after it would be of another run."""
    run("4ba")

    with pytest.raises(ResumeError, match="has already continued from ba00000003 to ba00000004"):
        run(resume=str(clean / "out" / "checkpoints" / "ba00000003"))


def test_a_trainer_that_was_overtaken_is_refused(run, clean):
    """Another process has trained on between its construction and its fit."""
    run("1ba")
    given = {"device": "cpu", "run_dir": clean / "out", "max_duration": "2ep"}
    late = Trainer(tiny_task(), checkpoint_interval="1ba", **given)
    run("3ba")

    with late, pytest.raises(ResumeError, match="has continued to batch 3 since"):
        late.fit()


def test_batches_and_loaders_of_a_task_may_be_written_otherwise(run):
    """Only what can be compared is: data is the task's own matter."""
    run("2ba")

    trainer, _ = run(given=Task(**{**vars(tiny_task()), "train_dataloader": tiny_batches()}))

    assert trainer.state.clock.batch == 6


def damage(path):
    """Flips a bit, so that only reading it all shows that something is wrong."""
    file = path / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)


def test_a_damaged_checkpoint_is_no_word_of_another_process(run, clean):
    """The run goes on from the one before, past the moment of the one that isn't used."""
    run("4ba", checkpoint_keep=None)
    damage(clean / "out" / "checkpoints" / "ba00000004")

    trainer, _ = run()

    assert "ba00000004 isn't used" in trainer.notes[0]
    assert trainer.state.clock.batch == 6


def test_what_a_killed_process_left_is_gone_when_the_run_goes_on(run, clean):
    """Whoever holds the run's lock knows that nobody else writes, on whichever machine."""
    run("2ba")
    elsewhere = clean / "out" / "checkpoints" / ".tmp-ba00000003-00000000-1-00000000"
    elsewhere.mkdir()

    run("3ba", checkpoint_interval=None)

    assert not elsewhere.exists()


def test_a_run_that_goes_on_holds_no_second_model(run, monkeypatch):
    """Each tensor is read when its turn comes; weights are given up before the next one is read."""
    weights, held = [], []
    read = SavedTensor.read

    def noted(self):
        held.append(sum(one() is not None for one in weights))
        tensor = read(self)
        if self.name in ("0.weight", "0.bias"):
            weights.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(SavedTensor, "read", noted)
    run("2ba")

    trainer, _ = run("3ba")

    assert len(weights) == 2
    assert max(held) == 0
    assert trainer.notes


def test_a_run_may_stand_for_its_newest_checkpoint(run, clean):
    """As in `eventloop checkpoints`."""
    run("4ba")

    trainer, _ = run("5ba", run_dir=clean / "branch", resume=str(clean / "out"))

    assert "batch 4" in trainer.notes[0]


def test_a_folder_that_is_not_there_is_told_of(run, clean):
    """Not of a manifest in it."""
    with pytest.raises(UsageError, match="there is no folder 'nope'"):
        run("5ba", resume="nope")


def test_a_folder_whose_checkpoints_are_gone_is_told_of(run, clean):
    """Who deleted them by mistake learns it before the run has begun anew."""
    run("2ba")
    shutil.rmtree(clean / "out" / "checkpoints")
    (clean / "out" / "manifest.json").write_text("{}")

    trainer, _ = run("1ba")

    assert "where a run has begun: it starts over" in trainer.notes[0]


def test_history_is_that_of_a_run_that_nobody_interrupted(clean):
    """Where it was interrupted is nothing that was learned."""
    import signal

    from eventloop import hookimpl

    class Interrupts:
        name = "interrupts"

        @hookimpl
        def batch_start(self, state):
            if state.clock.batch == 4:
                signal.raise_signal(signal.SIGINT)

    def history(*callbacks):
        with Trainer(tiny_task(), device="cpu", max_duration="2ep", callbacks=callbacks) as trainer:
            try:
                trainer.fit()
            except KeyboardInterrupt:
                trainer.fit()
            return [{**row, "seconds": 0} for row in trainer.fit().history]

    with pytest.warns(UserWarning, match="nothing to train"):
        assert history(Interrupts()) == history()
