"""The words of other trainers: each leads to what is there."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from eventloop import SettingError, Settings, State, Task, Trainer, hookimpl, vocabulary
from eventloop.config import option_types
from eventloop.config.configuration import Configuration
from eventloop.config.plugin_rules import KEYS
from eventloop.config.settings import SETTING_NAMES, setting_options
from eventloop.plugin.declared_hooks import HOOKS


@pytest.mark.parametrize(("word", "value"), vocabulary.SETTINGS.items())
def test_a_setting_of_another_trainer_is_named_with_a_value_that_works(word, value, make_task):
    """What the message says can be pasted."""
    name, example = value

    with pytest.raises(SettingError, match=f"no setting is named '{word}'; here it is {name}="):
        Trainer(make_task(), **{word: 1})

    assert Settings.__dataclass_fields__[name]
    Configuration.read(flags={name: example}).settings()


def test_a_flag_of_another_trainer_is_named_as_a_flag():
    """From the shell as the shell writes it."""
    configuration = Configuration.read(flags={"max_epochs": "3"}, kind="flag")

    with pytest.raises(SettingError, match="'--max-epochs'; here it is --max-duration 10ep"):
        configuration.settings()


@pytest.mark.parametrize(("word", "here"), [*vocabulary.TASK.items(), *vocabulary.TRAINER.items()])
def test_an_argument_of_another_trainer_is_named(word, here, make_task):
    """By the task and by the trainer; what is named is an argument of one of them."""
    for call in (lambda: Task(**{word: 1}), lambda: Trainer(make_task(), **{word: 1})):
        with pytest.raises((TypeError, SettingError)) as caught:
            call()
        assert f"'{word}'; here it is " in str(caught.value)
        assert here in str(caught.value)

    known = {*inspect.signature(Task).parameters, *inspect.signature(Trainer).parameters}
    assert "=" not in here or {part.split()[-1] for part in here.split("=")[:1]} <= known


@pytest.mark.parametrize(("word", "here"), vocabulary.HOOK_WORDS.items())
def test_a_hook_of_another_trainer_is_named(word, here, make_trainer, make_plugin):
    """Each leads to a hook, or to the method that keeps a plugin's state."""
    plugin = make_plugin("watch", fit_start=lambda state: None)
    setattr(type(plugin), word, hookimpl(lambda self, state: None))

    with pytest.raises(Exception, match="no hook is named") as caught:
        make_trainer(callbacks=[plugin])

    assert f"'{word}'; here it is {here}" in str(caught.value)
    assert here.split()[0] in HOOKS or here.startswith("the method ")


def test_a_method_that_another_trainer_would_call_is_refused(make_trainer):
    """Without the mark it would never be called, and nothing would say so."""

    class Watch:
        @hookimpl
        def fit_start(self, state):
            """Called when a fit begins."""

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            """Called by another trainer."""

    with pytest.raises(Exception, match="would never be called; here it is batch_end"):
        make_trainer(callbacks=[Watch()])


@pytest.mark.parametrize(("word", "here"), vocabulary.STATE.items())
def test_an_attribute_of_another_trainers_state_is_named(word, here, make_trainer):
    """By the State and by the trainer."""
    trainer = make_trainer()

    with pytest.raises(AttributeError, match=f"state has no '{word}'; here it is ") as caught:
        getattr(trainer.state, word)
    with pytest.raises(AttributeError, match=f"the trainer has no '{word}'; here it is trainer"):
        getattr(trainer, word)

    assert here in str(caught.value)
    place = trainer.state
    for name in here.removeprefix("state.").split("[")[0].split("(")[0].split(" ")[0].split("."):
        place = getattr(place, name)


@pytest.mark.parametrize(("word", "here"), vocabulary.METHODS.items())
def test_a_method_of_another_trainer_is_named(word, here, make_trainer):
    """Such as `train`, which is `fit` here."""
    trainer = make_trainer()

    with pytest.raises(AttributeError, match=f"the trainer has no '{word}'; here it is ") as caught:
        getattr(trainer, word)

    assert str(caught.value).endswith(here)


def test_no_word_is_one_of_ours():
    """A word that means something here would never be looked up."""
    words = {*vocabulary.SETTINGS, *vocabulary.TASK, *vocabulary.TRAINER}

    assert not words & {*SETTING_NAMES, *inspect.signature(Task).parameters}
    assert not vocabulary.HOOK_WORDS.keys() & HOOKS.keys()
    assert not vocabulary.STATE.keys() & set(dir(State))
    assert not vocabulary.METHODS.keys() & set(dir(Trainer))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("modle", "Task(...) has no argument 'modle'; the closest is 'model'"),
        ("max_duration", "it is a setting: Trainer(task, max_duration=...)"),
        ("max_epochs", 'here it is a setting: Trainer(task, max_duration="10ep")'),
        ("zzz", "Task(...) has no argument 'zzz'"),
    ],
)
def test_a_task_names_what_was_meant(name, said):
    """As the trainer does for its settings."""
    with pytest.raises(TypeError) as caught:
        Task(model=nn.Linear(1, 1), **{name: 1})

    assert said in str(caught.value)


def test_a_task_keeps_its_signature():
    """Editors and documents show the arguments."""
    assert "train_dataloader" in inspect.signature(Task).parameters


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "metrics"])
def test_what_belongs_into_the_task_is_told_to_the_trainer(name, make_task):
    """Both take keywords, which are easily mixed up."""
    with pytest.raises(SettingError, match=rf"value of the task.*\n.*write Task\({name}="):
        Trainer(make_task(), **{name: None})


def test_a_model_is_not_a_task():
    """The message doesn't print all of its layers."""
    with pytest.raises(TypeError, match=r"not a Sequential; write Task\(model=...\)"):
        Trainer(nn.Sequential(nn.Linear(1, 1)))


def test_the_closest_attribute_is_named(make_trainer, make_plugin):
    """Of the State, of a callback's view of it, and of the trainer."""
    watch = make_plugin("watch", fit_start=lambda state: state.lossy)
    trainer = make_trainer(callbacks=[watch])

    with pytest.raises(
        AttributeError, match=r"state.lossy isn't available to a callback; the closest is 'loss'"
    ):
        trainer.fit()
    with pytest.raises(AttributeError, match=r"state has no 'lossy'; the closest is 'loss'"):
        trainer.state.lossy
    with pytest.raises(AttributeError, match=r"the trainer has no 'fitt'; the closest is 'fit'"):
        trainer.fitt
    with pytest.raises(AttributeError, match=r"has no 'model'; here it is trainer.state.model"):
        trainer.model


def test_what_a_property_raises_isnt_hidden(make_trainer):
    """A batch of some kind of its own may lack an attribute."""
    trainer = make_trainer()
    type(trainer).broken = property(lambda self: self.state.batch.nothing)
    try:
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nothing'"):
            trainer.broken
    finally:
        del type(trainer).broken


@pytest.mark.parametrize(
    ("setting", "value", "here"),
    [
        (name, value, here)
        for name, words in vocabulary.VALUES.items()
        for value, here in words.items()
    ],
)
@pytest.mark.parametrize("kind", ["flag", "keyword"])
def test_a_value_of_another_trainer_is_named_with_one_that_works(kind, setting, value, here):
    """Names of settings are translated, and so are their values."""
    with pytest.raises(SettingError) as caught:
        Configuration.read(flags={setting: value.upper()}, kind=kind).settings()

    assert f"; here it is {here}\n" in str(caught.value)
    written = f"`{option_types.flag(setting)} {here}`"
    if kind == "keyword":
        written = f"`{setting}={option_types.as_python(here)}`"
    assert written in str(caught.value)
    Configuration.read(flags={setting: here}).settings()


def test_values_are_of_settings_and_none_is_ours():
    """A value that means something here would never be looked up."""
    assert vocabulary.VALUES.keys() <= {*SETTING_NAMES}
    for setting, words in vocabulary.VALUES.items():
        for word in words:
            if setting in ("device", "resume"):  # any text may be a device or a path
                continue
            with pytest.raises(ValueError, match=r"isn.t|is not"):
                option_types.convert_value(setting_options()[setting], word)


@pytest.mark.parametrize(
    ("name", "value", "here"),
    [("max_duration", 3, "3ep"), ("eval_interval", "5", "5ep"), ("log_interval", 50, "50ba")],
)
def test_a_time_without_a_unit_gets_the_usual_one(name, value, here):
    """Most trainers count epochs, and steps where it is about logging."""
    with pytest.raises(SettingError, match=f"here it is {here}\n") as caught:
        Configuration.read(flags={name: value}).settings()

    assert f'`{name}="{here}"`' in str(caught.value)


def test_a_checkpoint_may_have_the_name_of_a_word(tmp_path, monkeypatch):
    """`resume="latest"` is a path where there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest").mkdir()

    assert Configuration.read(flags={"resume": "latest"}).settings().resume == "latest"


@pytest.mark.parametrize("word", sorted(vocabulary.ACCUMULATION))
@pytest.mark.parametrize(("value", "batch_size"), [(4, 32), ("2", 16), ("auto", 32), (-1, 32)])
def test_accumulated_batches_are_a_batch_size_and_a_microbatch_size(
    word, value, batch_size, make_task
):
    """With the microbatch size alone a step would train on a fraction of the samples."""
    expected = f"microbatch_size=8 with DataLoader(..., batch_size={batch_size})"

    with pytest.raises(SettingError) as by_trainer:
        Trainer(make_task(), **{word: value})
    with pytest.raises(SettingError) as by_flag:
        Configuration.read(flags={word: value}, kind="flag").settings()

    assert f"here it is {expected}: a step trains on one batch of the loader" in str(
        by_trainer.value
    )
    assert expected.replace("microbatch_size=8", "--microbatch-size 8") in str(by_flag.value)
    assert f"split into {batch_size // 8} microbatches" in str(by_flag.value)


def test_a_task_names_both_sizes_for_accumulated_batches():
    """As the trainer does."""
    with pytest.raises(TypeError) as caught:
        Task(model=nn.Linear(1, 1), accumulation_steps=4)

    assert "Trainer(task, microbatch_size=8) with DataLoader(..., batch_size=32)" in str(
        caught.value
    )


@pytest.mark.parametrize(("word", "here"), vocabulary.RULES.items())
def test_a_word_for_a_rule_leads_to_a_rule(word, here):
    """An entry that can be pasted, and none that is there under its own name."""
    assert here.partition(" ")[0] in KEYS
    assert word not in KEYS
